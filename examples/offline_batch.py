"""Many prompts in one process, without a server: all of them run in one continuous batch."""

from serve_app import LLM, SamplingParams

prompts = [f"The capital of {country} is" for country in ("France", "Japan", "Italy", "Kenya", "Norway", "Greece")]
with LLM("default") as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6)):
        print(output.prompt + output.outputs[0].text.replace("\n", " "))

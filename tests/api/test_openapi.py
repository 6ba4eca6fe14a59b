"""The OpenAPI document: what it says, and, by generated requests over real HTTP, whether the server
does as it says."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.console.routes import Sources, add_console
from serve_app.text.tokenizer import Tokenizer
from tests.api.conftest import Api, Recorder
from tests.api.limits import make_limits
from tests.api.services import ScriptedService


@pytest.fixture
def url(tokenizer: Tokenizer) -> Iterator[str]:
    """The API and the console behind a real HTTP server; what they answer is scripted."""
    # room for one message, or one call, more than may be
    limits = make_limits(max_body_bytes=2**21)
    app = create_app(ScriptedService(tokenizer), AsyncAdmissionQueue(256, 256), limits, Recorder())

    async def recordings(seconds: float) -> list[bytes]:
        return []

    add_console(app, Sources(recordings, dict))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_requests_are_answered_as_the_document_says(url: str, tmp_path: Path) -> None:
    """The same ones each time: its examples, its limits and what is just beyond them, and random
    ones.

    What fits the document may be refused: it cannot say what fits together, nor what the context
    holds.
    """
    program = Path(sys.executable).with_name("schemathesis")
    how = "--phases examples,coverage,fuzzing --max-examples 10 --seed 1 --no-color --suppress-health-check all"
    checks = "--checks all --exclude-checks positive_data_acceptance"
    command = [program, "run", f"{url}/openapi.json", *how.split(), *checks.split()]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    generated = re.search(r"(\d+) generated", run.stdout)
    assert generated is not None
    assert int(generated[1]) >= 2000


@pytest.mark.parametrize("fits", [True, False])
async def test_examples_are_answered(api: Api, fits: bool) -> None:
    """Also with every field that is ignored, and not with one that is not known."""
    document = await document_of(api)
    for path, operations in document["paths"].items():
        if "post" not in operations:
            continue
        content = operations["post"]["requestBody"]["content"]["application/json"]
        schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        ignored = [name for name, field in schema["properties"].items() if field.get("description") == "Ignored."]
        body = {**content["example"], **dict.fromkeys(ignored, "x"), "nothing": None if fits else 1}
        assert (await api.http.post(path, json=body)).status_code == (200 if fits else 400)


async def document_of(api: Api) -> Any:
    return (await api.http.get("/openapi.json")).json()


async def test_all_references_lead_somewhere(api: Api) -> None:
    document = await document_of(api)
    known = document["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert {"ChatBody", "CompletionBody", "Message"} <= set(references) <= set(known)
    assert '"#/$defs' not in json.dumps(document)


async def test_fields_have_their_types_ranges_and_what_is_ignored(api: Api) -> None:
    schemas = (await document_of(api))["components"]["schemas"]
    completion, chat = schemas["CompletionBody"]["properties"], schemas["ChatBody"]["properties"]
    assert (completion["temperature"]["minimum"], completion["temperature"]["maximum"]) == (0, 2)
    assert (completion["top_p"]["exclusiveMinimum"], completion["seed"]["maximum"]) == (0, 2**63 - 1)
    assert completion["prompt"]["anyOf"][0] == {"type": "string"}
    assert (chat["metadata"], chat["verbosity"]["enum"]) == ({"description": "Ignored."}, ["medium", None])
    assert chat["audio"]["type"] == "null"
    assert schemas["ChatBody"]["additionalProperties"] == {"type": "null"}
    assert chat["tool_choice"]["anyOf"][0] == {"enum": ["none", "auto", "required"], "type": "string"}


async def test_refusals_have_the_shape_of_their_api(api: Api) -> None:
    paths = (await document_of(api))["paths"]
    for path, shape in {"/v1/messages": "AnthropicError", "/v1/responses": "Error"}.items():
        answers = paths[path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "415", "429", "503"} <= set(answers)
        assert "422" not in answers
        told = answers["429"]["content"]["application/json"]["schema"]["$ref"]
        assert told == f"#/components/schemas/{shape}"
    assert all(operation["description"] for operations in paths.values() for operation in operations.values())
    assert "413" not in paths["/v1/models"]["get"]["responses"]

"""See the package. Besides the lines, the file holds the ids of both models, and for each name of a
pre-tokenizer a checksum per line of the ids that the default model's vocabulary has under that
name; names with equal ones
together. Checksums too for a small SentencePiece vocabulary."""

import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_cpp import Llama

from load_tests.llama_cpp_ids import checksum
from load_tests.llama_cpp_ids.headers import write_header, write_sentencepiece
from load_tests.llama_cpp_ids.lines import make_lines
from serve_app.text.pre_tokenizers import PRE_TOKENIZERS


def token_ids(file: Path, lines: Sequence[str], *, add_bos: bool = False) -> list[list[int]]:
    """Control tokens in a line count as such."""
    model: Any = Llama(str(file), vocab_only=True, verbose=False)
    return [model.tokenize(line.encode(), add_bos=add_bos, special=True) for line in lines]


def main(default: str, gemma: str, output: str) -> None:
    lines = make_lines()
    found: dict[str, Any] = {
        "lines": lines,
        "default": token_ids(Path(default), lines),
        "gemma": token_ids(Path(gemma), lines, add_bos=True),
    }
    for name, space_in_front in (("sentencepiece", False), ("sentencepiece with a space in front", True)):
        with tempfile.TemporaryDirectory() as folder:
            file = write_sentencepiece(Path(folder, "file.gguf"), lines, space_in_front=space_in_front)
            found[name] = [checksum(ids) for ids in token_ids(file, lines, add_bos=True)]
    by_checksums: dict[tuple[int, ...], list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, pre in PRE_TOKENIZERS.items():
            if pre.byte_level:
                file = write_header(Path(folder, "file.gguf"), Path(default), {"tokenizer.ggml.pre": name})
                checksums = tuple(checksum(ids) for ids in token_ids(file, lines))
                by_checksums.setdefault(checksums, []).append(name)
                print(name, flush=True)
    found["pre"] = [[names, checksums] for checksums, names in by_checksums.items()]
    with gzip.GzipFile(output, "wb", mtime=0) as target:
        target.write(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What atheris runs: `python -m tests.fuzz.engine FORMAT SCRATCH [options of libFuzzer]`."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["torchtitan_ckpt.formats", "torchtitan_ckpt.manifest"]):
    from tests.fuzz.targets import refuse_code, target_of


def main() -> None:
    name, scratch, *options = sys.argv[1:]
    corpus, files = Path(scratch, "corpus"), Path(scratch, "files")
    corpus.mkdir()
    files.mkdir()
    target, seeds = target_of(name, files)
    for number, seed in enumerate(seeds):
        (corpus / f"seed{number}").write_bytes(seed)
    sys.addaudithook(refuse_code)
    atheris.Setup([sys.argv[0], str(corpus), *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""What lies beside the weights of a Hugging Face folder: config, tokenizer, generation files.

They are copied along; weights, their index and hidden files never are. The config says what the
files hold, so its dtype and its quantization are brought in line with them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_ckpt.errors import SaveError
from torchtitan_ckpt.formats.hf_file import write_problem
from torchtitan_ckpt.formats.strangers import leaves

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth",
            ".distcp", ".gguf", ".h5", ".msgpack", ".onnx")  # fmt: skip
_NAMES = ("config.json", "generation_config.json", "README.md", "LICENSE", "LICENSE.txt",
          "merges.txt", "vocab.txt", "preprocessor_config.json",
          "processor_config.json")  # fmt: skip
_PATTERNS = ("*token*", "*.model", "*.tiktoken", "vocab*", "chat_template*", "*config*.json",
             "configuration_*.py", "modeling_*.py", "tokenization_*.py", "*.jinja")  # fmt: skip
_LARGEST = 256 * 2**20


def assets_of(folder: Path) -> list[Path]:
    """The files to copy, sorted. Links out of the folder (but to the blobs of the Hugging Face
    cache), folders and files over 256 MiB stay behind."""
    found = []
    for path in sorted(folder.iterdir()):
        name = path.name
        wanted = name in _NAMES or any(path.match(pattern) for pattern in _PATTERNS)
        if not wanted or name.startswith(".") or name.endswith(_WEIGHTS) or not path.is_file():
            continue
        if "index.json" in name or path.stat().st_size > _LARGEST or leaves(folder, name):
            continue
        found.append(path)
    return found


def copy_assets(folder: Path, target: Path, changes: Mapping[str, Any]) -> list[str]:
    """Copy them into `target`; files that are there already win. Returns the names.

    `changes` are applied to config.json: a value replaces the field, None removes it.
    """
    names = []
    for path in assets_of(folder):
        if (target / path.name).exists():
            continue
        try:
            if path.name == "config.json":
                (target / path.name).write_text(changed(path, changes), encoding="utf-8")
            else:
                shutil.copyfile(path, target / path.name)
        except OSError as error:
            place = Path(error.filename or target / path.name)
            problem = write_problem(place, "copied beside the weights", error, "convert.asset")
            raise SaveError(problem) from error
        names.append(path.name)
    return names


def changed(path: Path, changes: Mapping[str, Any]) -> str:
    """The text of a config.json with changes; its own text where there is nothing to change."""
    text = path.read_text(encoding="utf-8")
    if not changes:
        return text
    tree = json.loads(text)
    for name, value in changes.items():
        if value is None:
            tree.pop(name, None)
        else:
            tree[name] = value
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def config_changes(
    *, dtype: str | None, quantized: str, dequantized: bool, scale: str = ""
) -> dict[str, Any]:
    """What an export changes in config.json."""
    changes: dict[str, Any] = {}
    if dtype is not None:
        changes |= {"dtype": dtype, "torch_dtype": None}
    if dequantized and not quantized:
        changes["quantization_config"] = None
    if quantized == "fp8":
        changes["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            **({"scale_fmt": scale} if scale else {}),
        }
    elif quantized == "mxfp4":
        changes["quantization_config"] = {"quant_method": "mxfp4"}
    return changes

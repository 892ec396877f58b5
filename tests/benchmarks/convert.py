"""Conversions of a 0.6B checkpoint in Qwen3's shapes, made on the spot, against torchtitan's flows.

    python tests/benchmarks/convert.py [--runs 5] [--rows hf,dcp,pt,moe,layers] [--keep FOLDER]

Every call is a process of its own: seconds of the work alone, on the clock and of the processor
(which other jobs on the machine stretch less), and the peak of anonymous memory above the import's.
Ratios are of medians of one run, with a warm page cache; nobody waits for the disk (torch's writers
do not either) unless `--sync`. The other side does what torchtitan 0.3.0's conversion scripts do
with its own model and adapter, which it builds first (`pip install 'torchtitan-ckpt[titan]'`). A
script, not a test: times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# gpt-oss stacks gate and up in one tensor a layer, here of 4.3 GB, and stores its transpose.
MOE = {
    **CONFIG,
    "model_type": "gpt_oss",
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_local_experts": 128,
    "vocab_size": 64,
    "expert_bias": False,
}

PRELUDE = """
import sys, threading, time
import torch, torch.distributed.checkpoint, safetensors.torch
import torch.distributed.checkpoint.hf_storage, torch.distributed.checkpoint.format_utils
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.models.qwen3 import model_registry
from torchtitan_ckpt import convert
from torchtitan_ckpt.convert.options import Options
import warnings; warnings.simplefilter("ignore")
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(l.split()[1]) for l in file if l.startswith("RssAnon")) * 1024
base = anonymous(); peak = [base]; over = threading.Event()
def watch():
    while not over.is_set():
        peak[0] = max(peak[0], anonymous()); time.sleep(0.005)
thread = threading.Thread(target=watch); thread.start()
src, dst, config = sys.argv[1:4]
begin, cpu = time.perf_counter(), time.process_time()
"""
END = """
seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
over.set(); thread.join()
print(seconds, cpu, peak[0] - base)
"""
OURS = "convert.convert(Options(src=src, dst=dst, config=config, **{options}))\n"
# What torchtitan's scripts/checkpoint_conversion/convert_to_hf.py and convert_from_hf.py do.
MODEL = """
torch.set_grad_enabled(False)
spec = model_registry("0.6B")
spec.model.enable_weight_tying = False
with torch.device("cpu"):
    model = spec.model.build()
state = ModelWrapper(model)._get_state_dict()
adapter = spec.state_dict_adapter(spec.model, None)
"""
TO_HF = f"""{MODEL}
torch.distributed.checkpoint.load(state, checkpoint_id=src, no_dist=True)
hf = {{k: v.to(torch.bfloat16) for k, v in adapter.to_hf(state).items()}}
writer = torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter(
    path=dst, save_distributed=True, fqn_to_index_mapping={{k: 1 for k in hf}},
    enable_consolidation=True, thread_count_consolidation=5)
torch.distributed.checkpoint.save(hf, storage_writer=writer, no_dist=True)
"""
FROM_HF = f"""{MODEL}
hf = adapter.to_hf(state)
reader = torch.distributed.checkpoint.hf_storage.HuggingFaceStorageReader(src)
torch.distributed.checkpoint.load(hf, storage_reader=reader, no_dist=True)
torch.distributed.checkpoint.save(adapter.from_hf(hf), checkpoint_id=dst, no_dist=True)
"""
TO_PT = "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(src, dst)\n"


class Bench:
    def __init__(self, root: Path, runs: int, sync: bool) -> None:
        self.root, self.runs, self.sync = root, runs, sync

    def run(self, code: str, src: Path, dst: Path, config: Path) -> tuple[float, float, float]:
        remove(dst)
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code + END, str(src), str(dst), str(config)],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds, cpu, peak = done.stdout.split()[-3:]
        return float(seconds), float(cpu), int(peak) / 2**30

    def ours(self, **options: object) -> str:
        return OURS.replace("{options}", repr({"no_sync": not self.sync, **options}))

    def cat(self, source: Path, size_out: int, into: Path) -> tuple[float, float, float]:
        """Seconds to read every byte of the source and to write as many as the result has."""
        code = (
            f"import os\nfor p in __import__('pathlib').Path({str(source)!r}).iterdir():\n"
            "    f = os.open(p, os.O_RDONLY)\n    while os.read(f, 1 << 20): pass\n"
            f"o = open({str(into)!r}, 'wb', buffering=0); b = bytes(1 << 20)\n"
            f"for _ in range({size_out >> 20}): o.write(b)\n"
        )
        return self.run(code, source, self.root / "none", source)

    def row(
        self, title: str, calls: dict[str, str], src: Path, dst: Path, config: Path, cat: int = 0
    ) -> None:
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
        cats = []
        for _ in range(self.runs):
            for name, code in calls.items():
                found[name].append(self.run(code, src, dst, config))
                remove(dst)
            if cat:
                cats.append(self.cat(src, cat, self.root / "zeros"))
                remove(self.root / "zeros")
        print(f"{title} (median of {self.runs}, warm cache)")
        medians = {
            name: [statistics.median(column) for column in zip(*runs, strict=True)]
            for name, runs in found.items()
        }
        for name, runs in found.items():
            wall, cpu, _ = medians[name]
            peak = max(row[2] for row in runs)
            print(f"  {name:<22}{wall:8.2f} s  {cpu:7.2f} s of CPU  peak {peak:5.2f} GiB")
        others = [name for name in calls if not name.startswith("ours")]
        for mine in (name for name in calls if name.startswith("ours")):
            for other in others:
                ratio, busy = (medians[other][i] / medians[mine][i] for i in (0, 1))
                print(f"  {other} / {mine} = {ratio:.1f} (CPU {busy:.1f})")
            if cats:
                ratio, busy = (
                    medians[mine][i] / statistics.median(row[i] for row in cats) for i in (0, 1)
                )
                print(f"  {mine} / cat = {ratio:.2f} (CPU {busy:.2f})")
        sys.stdout.flush()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make(root: Path, config: dict[str, object], name: str) -> tuple[Path, Path]:
    """A DCP in float32 and its config."""
    from torchtitan_ckpt.adapter import MappingAdapter
    from torchtitan_ckpt.formats.dcp_stream import DcpStreamWriter, write_metadata
    from torchtitan_ckpt.formats.hf_boxes import split_box

    where = root / f"{name}-config"
    where.mkdir()
    (root / name).mkdir()
    (where / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    entries = MappingAdapter(where).native_entries()
    with DcpStreamWriter(root / name, sync_files=False) as writer:
        for key, entry in entries.items():
            for at, sizes in split_box(entry.shape, (0,) * len(entry.shape), entry.shape, 2**28):
                writer.write(key, torch.empty(sizes).uniform_(-1, 1), at)
        write_metadata(root / name, entries.values(), writer.finish(), sync_files=False)
    size = sum(entry.nbytes for entry in entries.values())
    print(f"{name}: {len(entries)} tensors, {size / 1e9:.2f} GB")
    return root / name, where


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", default="hf,dcp,pt,moe,layers")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    rows = args.rows.split(",")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        bench = Bench(root, args.runs, args.sync)
        half = {"export_dtype": "bfloat16"}
        if {"hf", "dcp", "pt"} & set(rows):
            dcp, config = make(root, CONFIG, "dense")
            out = sum(p.stat().st_size for p in dcp.iterdir()) // 2
            if "hf" in rows:
                calls = {
                    "torchtitan's flow": TO_HF,
                    "ours, compared": bench.ours(**half),
                    "ours, not compared": bench.ours(**half, no_verify=True),
                }
                bench.row("DCP fp32 -> HF bf16", calls, dcp, root / "hf", config, out)
            if "pt" in rows:
                calls = {
                    "dcp_to_torch": TO_PT,
                    "ours, compared": bench.ours(),
                    "ours, not compared": bench.ours(no_verify=True),
                }
                bench.row("DCP -> .pt", calls, dcp, root / "x.pt", config, 2 * out)
            if "dcp" in rows:
                bench.run(bench.ours(**half, no_verify=True), dcp, root / "src", config)
                remove(dcp)
                wide = {"export_dtype": "float32"}
                calls = {
                    "torchtitan's flow": FROM_HF,
                    "ours, compared": bench.ours(**wide),
                    "ours, not compared": bench.ours(**wide, no_verify=True),
                }
                bench.row("HF bf16 -> DCP fp32", calls, root / "src", root / "d", config, 2 * out)
                remove(root / "src")
            remove(dcp)
        if "layers" in rows:
            for count in (7, 28):
                one, config = make(
                    root, {**CONFIG, "num_hidden_layers": count, "vocab_size": 1000}, f"l{count}"
                )
                calls = {"ours, compared": bench.ours(**half)}
                bench.row(f"{count} layers", calls, one, root / "hf", config)
                remove(one)
        if "moe" in rows:
            moe, config = make(root, MOE, "moe")
            calls = {"ours, compared": bench.ours(**half, window=2**30)}
            bench.row("4.3 GB expert tensor, 1 GB window", calls, moe, root / "hf", config)


if __name__ == "__main__":
    main()

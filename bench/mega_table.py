"""The README's table of the CUDA megakernel: measured beside torch in one process, then written.

    python bench/mega_table.py run [--json bench/results/mega_bench.json] [SPECS]   # on a device
    python bench/mega_table.py write                                                # the README

A row is a whole greedy decode step (head and argmax included), as in `bench/mega_cuda.py`, whose
specs these are; the bf16 step of torch, compiled, in a CUDA graph, is replayed right behind ours
for the rows of TORCH (not with --no-torch: then these are what others of the run compare with).
Of several files `mega_bench*.json` a row is that of the newest run that has all of it; each run is
named with its rows. A test checks that the README holds exactly what `write` makes of the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from obelisk.base.errors import ObeliskError
from obelisk.plan import Plan

RESULTS = Path(__file__).parent / "results" / "mega_bench.json"
OTHER = " (of another run)"
README = Path(__file__).parents[1] / "README.md"
MARKS = (
    "<!-- the megakernel: written by bench/mega_table.py -->\n",
    "<!-- end of the megakernel -->\n",
)
ROWS = (
    "llama3.2-1b", "llama3.2-1b:8", "llama3.2-1b::4096", "llama3.2-1b::::fp32",
    "qwen3-0.6b", "qwen2.5-1.5b", "qwen3-1.7b", "qwen3-1.7b::::int8", "qwen3-1.7b::::w4a16",
    "qwen3-1.7b::::w4a16+head8", "qwen3-8b", "qwen3-0.6b:::ada", "llama3.2-1b:::ada",
    "qwen2.5-1.5b:::ada", "qwen3-8b:::ada",
)  # fmt: skip
TORCH = ("llama3.2-1b", "qwen3-0.6b", "qwen2.5-1.5b")  # in bf16, beside ours
COPY = 1 << 30  # bytes of a copy that measures bandwidth
ADA = "99 KB, no bulk copies"


def bandwidth() -> float:
    """Bytes per second that a copy in device memory moves, read and written: a median."""
    import torch

    source, target = (torch.ones(COPY, dtype=torch.uint8, device="cuda") for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    rates = []
    for _ in range(9):
        events[0].record()
        target.copy_(source)
        events[1].record()
        torch.cuda.synchronize()
        rates.append(2 * COPY / (events[0].elapsed_time(events[1]) * 1e-3))
    return sorted(rates)[len(rates) // 2]


def run(specs: list[str], beside: bool = True) -> dict[str, Any]:
    """Times of all specs, one after the other, those of torch behind ours."""
    import mega_cuda
    import torch
    from mega_cuda_torch import baseline

    from obelisk.runtime.cuda_driver import Device

    machine = mega_cuda.device_here()

    def make(spec: str) -> Plan | ObeliskError:
        try:
            return mega_cuda.plan_for(spec, machine)
        except ObeliskError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        plans = list(pool.map(make, specs))
    rows: list[dict[str, Any]] = []
    arena, made = 0, ("", "")
    for spec, plan in zip(specs, plans, strict=True):
        if isinstance(plan, ObeliskError):
            rows.append({"spec": spec, "raised": str(plan)})
            continue
        name, batch, context, _, form = mega_cuda.parts(spec)
        if (name, form) != made:
            if arena:
                Device().free(arena)
            arena, made = mega_cuda.random_arena(plan), (name, form)
        row = mega_cuda.time_one(spec, plan, arena, context)
        row["bytes"] = round(row.pop("TBs") * row["us"] * 1e6)
        row = {k: v for k, v in row.items() if k not in ("layer", "shared")}
        if beside and spec in TORCH:
            row["torch"] = baseline(mega_cuda.SHAPES[name], name, batch, context)
            torch.cuda.empty_cache()
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "tiling"}), flush=True)
    return {
        "schema": 1,
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python bench/mega_table.py run{'' if beside else ' --no-torch'}",
        "commit": None,
        "environment": {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "bandwidth": bandwidth(),
        },
        "rows": rows,
    }  # fmt: skip


def runs() -> list[dict[str, Any]]:
    """All stored runs, the newest first: by date, then by the file's name."""
    found = [
        (data["date"], path.name, data)
        for path in RESULTS.parent.glob("mega_bench*.json")
        for data in [json.loads(path.read_text())]
    ]
    return [data for *_, data in sorted(found, key=lambda x: x[:2], reverse=True)]


def against(row: dict[str, Any], own: dict[str, Any], newest: dict[str, Any]) -> str:
    """How a row compares with the row of the same model that it is a variation of: in its own run,
    or else in the newest that has it.
    """
    name, batch, context, changes, form = [*row["spec"].split(":"), "", "", "", ""][:5]
    plain, where = (own[name], "") if name in own else (newest.get(name), OTHER)
    if plain is None or row is plain:
        return ""
    ratio = row["us"] / plain["us"]
    if form:
        return f"{1 / ratio:.2f} times as fast as bf16{where}"
    if changes.startswith("ada"):
        return f"{ratio:.2f} of the plan for sm_90a{where}"
    if batch:
        return f"{ratio:.2f} of batch 1{where}"
    if context:
        longer = plain["us"] * (row["bytes"] / plain["bytes"])
        return f"{row['us'] / longer:.3f} of position 512's time for as many bytes{where}"
    return ""


def whole(row: dict[str, Any]) -> bool:
    """Whether a row has all that is shown of it."""
    return row["spec"] not in TORCH or "torch" in row


def line(row: dict[str, Any], bandwidth: float, compared: str) -> str:
    """One row of the table."""
    name, batch, context, changes, form = [*row["spec"].split(":"), "", "", "", ""][:5]
    title = f"{name}, {ADA}" if changes.startswith("ada") else name
    weights = form.replace("+head8", ", head int8") or "bf16"
    floor = row["bytes"] / bandwidth * 1e6
    torch = row.get("torch")
    theirs, ratio = ("-", "-")
    if torch is not None:
        theirs, ratio = f"{torch['torch_us']:.0f}", f"{torch['torch_us'] / row['us']:.2f}"
    return (
        f"| {title} | {batch or 1} | {context or 512} | {weights} | {row['us']:.1f} | "
        f"{row['least']:.1f} to {row['most']:.1f} | {floor / row['us']:.0%} | {theirs} | "
        f"{ratio} | {compared} |"
    )


def table(stored: list[dict[str, Any]]) -> str:
    """One row per spec, then what was run where. Runs: the newest first."""
    by_run = [{r["spec"]: r for r in data["rows"] if "raised" not in r} for data in stored]
    newest = {spec: row for rows in reversed(by_run) for spec, row in rows.items()}
    known = [data["environment"].get("bandwidth") for data in stored]
    lines = [
        "| model | batch | position | weights | us a step | least to most | of the floor | "
        "torch.compile | torch / ours | in comparison |",
        "|---|" + "---|" * 9,
    ]
    shown: list[list[str]] = [[] for _ in stored]
    for spec in ROWS:
        at = next((i for i, rows in enumerate(by_run) if spec in rows and whole(rows[spec])), None)
        if at is None:
            continue
        shown[at].append(spec)
        bandwidth = known[at] or next(x for x in known if x)
        row = by_run[at][spec]
        lines.append(line(row, bandwidth, against(row, by_run[at], newest)))
    rates = sorted({f"{x / 1e12:.2f}" for x in known if x})
    text = (
        "One greedy step of the whole model, head and argmax included: the median of six launches "
        "of 128 steps, random weights. Floor: the bytes of the weights, keys and values that a "
        f"step reads over the copy bandwidth ({', '.join(rates)} TB/s, reads and writes, of the "
        "same run, or of the newest that measured it; a kernel that only reads may pass it). "
        "torch.compile: the same step in bf16, in a CUDA graph, replayed in the same process "
        "behind ours. Hosts differ by up to 3%."
    )
    for data, specs in zip(stored, shown, strict=True):
        if specs:
            where = data["environment"]
            text += (
                f" {', '.join(f'`{s}`' for s in specs)}: `{data['command']}`"
                f"{data.get('note', '')}, commit {data['commit']}, {data['date']}, "
                f"{where['device']}, torch {where['torch']}, CUDA {where['cuda']}."
            )
    return "\n".join([*lines, "", text, ""])


def write() -> None:
    """Replace what is between the README's marks."""
    text = README.read_text(encoding="utf-8")
    head, mark, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"{README} has no marks for this table")
    README.write_text(head + mark + table(runs()) + end + tail, "utf-8")


def main() -> None:
    """Run one part."""
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    if args.what == "write":
        write()
        return
    found = run(args.specs or [*ROWS], not args.no_torch)
    args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

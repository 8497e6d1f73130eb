"""The commands of the megakernel: `synth`, `generate` and `plan show`.

`register` adds them to the command line's application. Like all commands they are a few lines
around functions that Python can call.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from obelisk.app.compare import TOLERANCE, Difference, compare, first_beyond
from obelisk.app.compare_cuda import TOLERANCE as CUDA_TOLERANCE
from obelisk.app.compare_cuda import compare_cuda, recording_plan
from obelisk.app.display import Display, rows_table, stdout
from obelisk.app.explain_gpu import (
    explain_gpu,
    predicted_timeline,
    print_explained,
    require_pass,
    text_of_pass,
)
from obelisk.app.report import show_bytes, show_us
from obelisk.app.synth import describe, explain, require_directory, synthesise, workload_of
from obelisk.app.synth_cuda import describe_gpu, machine_of, synthesise_cuda, tiling_of
from obelisk.base.errors import UserError
from obelisk.engine import Engine, Sampling, Tokenizer
from obelisk.machine import Machine, MachineKind
from obelisk.mega import Target, target_of
from obelisk.plan import Plan, read_plan, write_plan
from obelisk.runtime import Checkpoint, CpuSession, CudaSession, load_session, trace_events
from obelisk.runtime.packing import stored
from obelisk.runtime.session import require_weights
from obelisk.schedule import Choice, SearchAccount
from obelisk.tasks import ModelConfig, Workload, read_config

plan_app = typer.Typer(help="What a plan holds.", no_args_is_help=True)
TEMPERATURE = 0.8
TRACED = 1 << 16  # tasks of a core in a timeline: it shows the last launch
_EXPLAINED = 12  # schedules listed by --explain

PlanArg = Annotated[Path, typer.Argument(metavar="PLAN", help="A file written by `synth`.")]
JsonOpt = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
]


def _write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _explained_json(choices: list[Choice], account: SearchAccount) -> dict[str, Any]:
    """What `--explain` says of a CPU's schedules, ranked."""
    return {
        "choices": [
            {
                "sync": c.schedule.sync.value, "tiling": c.schedule.shape.tiling.to_json(),
                "predicted_seconds": c.timeline.seconds,
                "scratch_bytes": c.schedule.pages.nbytes, **asdict(c.resources),
            }
            for c in choices
        ],
        "tried": account.tried, "pruned": dict(account.pruned), "examples": list(account.examples),
    }  # fmt: skip


def _explain(choices: list[Choice], account: SearchAccount) -> None:
    console = stdout()
    first = choices[0].resources
    console.print(
        f"weights {show_bytes(first.weight_bytes)}, "
        f"key-value cache {show_bytes(first.cache_bytes)}, read by a step "
        f"at the full context {show_bytes(first.step_bytes)}"
    )
    rows = [
        (describe(c), show_bytes(c.resources.footprint), c.resources.hungriest.value,
         show_bytes(c.schedule.pages.nbytes), show_us(c.timeline.seconds * 1e6))
        for c in choices[:_EXPLAINED]
    ]  # fmt: skip
    console.print(
        rows_table(("schedule", "close by", "for", "scratch", "predicted us"), rows, left=1)
    )
    if len(choices) > _EXPLAINED:
        console.print(f"and {len(choices) - _EXPLAINED} more")
    pages = choices[0].schedule.pages.pages
    shared = [
        f"{a} and {b}" for i, (a, p) in enumerate(pages) for b, q in pages[i + 1 :]
        if p.offset < q.offset + q.stride and q.offset < p.offset + p.stride
    ]  # fmt: skip
    console.print(f"pages shared between values: {', '.join(shared) or 'none'}")
    cut = ", ".join(f"{n} by {limit}" for limit, n in account.pruned) or "none"
    console.print(f"{account.tried} choices in {account.seconds:.1f} s; pruned: {cut}")
    for example in account.examples:
        console.print(Text(f"  {example}"), soft_wrap=True)


def _check_search_options(
    machine: Machine, cores: int | None, explain_only: bool, ir_pass: str | None,
    checkpoint: Path | None, resume: bool, timeline: Path | None,
) -> None:  # fmt: skip
    """Refuse options that would be ignored, and more SMs than there are."""
    if ir_pass is not None and not explain_only:
        raise UserError("--ir shows the passes of a search: it needs --explain")
    if timeline is not None and not explain_only:
        raise UserError("--timeline of synth is the predicted one: it needs --explain")
    if resume and checkpoint is None:
        raise UserError("--resume needs --checkpoint FILE, the file to begin with")
    if machine.kind is MachineKind.CUDA:
        if cores is not None and cores > machine.cores:
            raise UserError(f"{cores} SMs asked for, {machine.name} has {machine.cores}")
        return
    for name, value in (
        ("--ir", ir_pass), ("--checkpoint", checkpoint), ("--timeline", timeline)
    ):  # fmt: skip
        if value is not None:
            raise UserError(f"{name} is for GPUs: the CPU's few schedules are searched in seconds")


def _explain_gpu(
    config: ModelConfig, work: Workload, machine: Machine, cores: int | None, ir_pass: str | None,
    checkpoint: Path | None, resume: bool, timeline: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    require_pass(ir_pass)
    with Display() as progress:
        found = explain_gpu(
            config, work, machine, blocks=cores, checkpoint=checkpoint, resume=resume,
            progress=progress,
        )  # fmt: skip
    if ir_pass is not None:
        typer.echo(text_of_pass(config, work, found.choices[0], machine, ir_pass), nl=False)
    else:
        print_explained(found, stdout())
    if timeline is not None:
        made = predicted_timeline(config, work, found.choices[0], machine)
        timeline.write_text(json.dumps(made), encoding="utf-8")
    _write_json(json_file, found.to_json())


def _synth_cuda(
    model: Path, work: Workload, machine: Machine, blocks: int | None, profile: int,
    checkpoint: Path | None, resume: bool, output: Path, json_file: Path | None,
) -> None:  # fmt: skip
    with Display() as progress:
        made = synthesise_cuda(
            model, work, machine, blocks=blocks, profile=profile, checkpoint=checkpoint,
            resume=resume, progress=progress,
        )  # fmt: skip
    write_plan(made.plan, output)

    def shown(seconds: float | None) -> str:
        return "-" if seconds is None else show_us(seconds * 1e6)

    rows = [(p.note, shown(p.predicted), shown(p.seconds)) for p in made.profiled]
    console = stdout()
    console.print(rows_table(("schedule", "predicted us", "measured us"), rows, left=1))
    step = made.plan.measured.get("step_seconds")
    said = (
        f"{step * 1e3:.3f} ms a step" if step
        else f"compiled for {machine.arch}, nothing measured: no such device here"
    )  # fmt: skip
    console.print(Text(f"{output}: {said}, synthesised in {made.seconds:.1f} s"), soft_wrap=True)
    _write_json(json_file, made.plan.manifest())


def _synth_cpu(
    model: Path, device: str, batch: int, context: int | None, weights: str, head: str | None,
    cores: int | None, profile: int, output: Path, json_file: Path | None,
) -> None:  # fmt: skip
    with Display() as progress:
        made = synthesise(
            model, device=device, batch=batch, context=context, weights=weights, head=head,
            cores=cores, profile=profile, progress=progress,
        )  # fmt: skip
    write_plan(made.plan, output)
    rows = [
        (str(p.rank), p.note, show_us(p.predicted * 1e6), show_us(p.seconds * 1e6))
        for p in made.profiled
    ]
    console = stdout()
    console.print(rows_table(("rank", "schedule", "predicted us", "measured us"), rows, left=2))
    seconds = made.plan.measured["step_seconds"]
    rate = made.plan.measured["step_bytes"] / seconds / 1e9
    console.print(
        f"{output}: {seconds * 1e3:.3f} ms a step ({1 / seconds:.0f} tokens/s a sequence, "
        f"{rate:.1f} GB/s), synthesised in {made.seconds:.1f} s"
    )
    _write_json(json_file, made.plan.manifest())


def synth(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="config.json and *.safetensors.")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PLAN", help="Where the plan goes.")
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", help="cpu, cuda (the GPU here), or sm_80, sm_90a, h200, ..."),
    ] = "cpu",
    batch: Annotated[int, typer.Option("--batch", help="Sequences decoded together.")] = 1,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Positions of a sequence [2048, or the model's]."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="fp32, bf16, fp16, int8, w4a16, w4a16:64 (groups) [fp32; GPUs: bf16].",
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", help="With w4a16: 16 or int8 (a scale a row) for the head [16]."),
    ] = None,
    cores: Annotated[
        int | None, typer.Option("--cores", help="Pinned threads, or SMs [all].")
    ] = None,
    profile: Annotated[
        int, typer.Option("--profile", min=1, help="How many schedules to build and time.")
    ] = 3,
    explain_only: Annotated[
        bool, typer.Option("--explain", help="Say what fits and what was pruned; build nothing.")
    ] = False,
    ir_pass: Annotated[
        str | None,
        typer.Option("--ir", metavar="PASS", help="With --explain, GPUs: the IR after a pass."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FILE", help="GPUs: keep what the search simulated."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Begin with what the checkpoint holds.")
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="FILE", help="With --explain, GPUs: the predicted Perfetto trace."
        ),
    ] = None,
    json_file: JsonOpt = None,
) -> None:
    """Synthesise a megakernel for a model: one program that runs whole decode steps."""
    require_directory(model)
    machine = machine_of(device)
    _check_search_options(machine, cores, explain_only, ir_pass, checkpoint, resume, timeline)
    if explain_only:
        config = read_config(model)
        if machine.kind is MachineKind.CUDA:
            work = workload_of(config, batch, context, weights or "bf16", model, head)
            _explain_gpu(
                config, work, machine, cores, ir_pass, checkpoint, resume, timeline, json_file
            )  # fmt: skip
            return
        work = workload_of(config, batch, context, weights or "fp32", model, head)
        found = explain(config, work, machine, cores)
        _explain(*found)
        _write_json(json_file, _explained_json(*found))
        return
    if output is None:
        raise UserError("synth needs -o PLAN, the file to write (or --explain)")
    if not output.absolute().parent.is_dir():  # known before minutes of work
        raise UserError(f"no directory {output.absolute().parent} to write the plan in")
    if target_of(machine) is Target.CUDA:
        work = workload_of(read_config(model), batch, context, weights or "bf16", model, head)
        _synth_cuda(model, work, machine, cores, profile, checkpoint, resume, output, json_file)
        return
    _synth_cpu(
        model, device, batch, context, weights or "fp32", head, cores, profile, output, json_file
    )  # fmt: skip


def _prompt(plan: Plan, text: str | None, ids: str | None, folder: Path) -> list[int]:
    if (text is None) == (ids is None):
        raise UserError("generate needs one prompt: --prompt TEXT or --prompt-ids 1,2,3")
    if text is not None:
        return Tokenizer(folder).encode(text)
    try:
        return [int(x) for x in str(ids).split(",")]
    except ValueError:
        raise UserError(f"--prompt-ids is {ids!r}, expected integers with commas: 1,2,3") from None


def generate(
    plan_file: PlanArg,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="IDS", help="Token ids: 1,2,3.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens.")] = 64,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token.")] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy [0.8].")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep the k likeliest [0: all].")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the likeliest of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same tokens.")] = 0,
    ids: Annotated[
        bool, typer.Option("--ids", help="End with the new token ids, with commas.")
    ] = False,
    weights_dir: Annotated[
        Path | None, typer.Option("--weights-dir", metavar="DIR", help="Where the weights are now.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE", help="Write a Perfetto trace.")
    ] = None,
    json_file: JsonOpt = None,
) -> None:
    """Continue a prompt with a plan."""
    plan = read_plan(plan_file)
    folder = weights_dir or Path(plan.weights_path)
    tokens = _prompt(plan, prompt, prompt_ids, folder)
    if greedy and (temperature is not None or top_k or top_p != 1.0):
        raise UserError("--greedy takes the likeliest: leave --temperature, --top-k, --top-p out")
    engine = Engine.load(plan_file, weights_dir)
    if timeline is not None:
        engine.session.trace_room = TRACED
    warmth = TEMPERATURE if temperature is None else temperature
    sampling = Sampling() if greedy else Sampling(warmth, top_k, top_p, seed)
    result = engine.generate([tokens], max_tokens, sampling=sampling)[0]
    if timeline is not None:
        timeline.write_text(json.dumps(trace_events(engine.session.spans)), encoding="utf-8")
    if not ids:
        text = Tokenizer(folder).decode(result.tokens) if prompt is not None else None
        typer.echo(text if text is not None else " ".join(map(str, result.tokens)))
    timing = engine.timing
    steps, seconds = timing.steps, timing.seconds
    before = (
        f"; {timing.prefilled} tokens of the prompt in {timing.prefill_seconds:.3f} s"
        if timing.prefilled else ""
    )  # fmt: skip
    loaded = engine.session.loaded
    if loaded is not None:
        typer.echo(
            f"loaded: plan {loaded.plan:.2f} s, weights {loaded.weights:.2f} s, kernel and memory "
            f"{loaded.rest:.2f} s", err=True,
        )  # fmt: skip
    why = result.reason
    if why == "length" and len(result.tokens) < max_tokens:
        why += f": the plan's context of {plan.context} is full"
    typer.echo(
        f"{len(result.tokens)} tokens ({why}){before}; {steps} steps in {seconds:.3f} s, "
        f"{steps / seconds if seconds else 0:.0f} a second",
        err=True,
    )
    if ids:
        typer.echo(",".join(map(str, result.tokens)))
    _write_json(
        json_file,
        {
            "prompt": tokens, "tokens": list(result.tokens), "reason": result.reason,
            "steps": steps, "seconds": seconds, "prefilled": timing.prefilled,
            "prefill_seconds": timing.prefill_seconds,
            "loaded": None if loaded is None else asdict(loaded),
        },
    )  # fmt: skip


def _decided(plan: Plan) -> dict[str, str]:
    """What the schedule decided, in a few words."""
    if plan.target == "cuda":
        shared, launch = plan.schedule["shared"], plan.schedule["launch"]
        total = sum(shared.values())
        return {
            "schedule": describe_gpu(tiling_of(plan)),
            "block": f"{launch['threads']} threads, {show_bytes(total)} of shared memory, of it "
                     f"the ring {show_bytes(shared['ring'])}",
        }  # fmt: skip
    return {
        "schedule": str(plan.measured.get("schedule", plan.schedule["sync"])),
        "tasks": f"{plan.schedule['tasks_per_core']} a core, "
                 f"waits {plan.schedule['waits_per_core']}",
    }  # fmt: skip


def _step_timeline(plan: Plan, weights_dir: Path | None) -> dict[str, Any]:
    """One step in the middle of the context, every core's or block's tasks by the clocks in the
    kernel; the second of two, so that memory was touched before.
    """
    session = load_session(plan, weights_dir)
    session.trace_room = TRACED
    for _ in range(2):
        session.position[:] = plan.context // 2
        session.launch([[1 % plan.vocab]] * plan.batch, [1] * plan.batch)
    made = trace_events(session.spans)
    session.close()
    return made


def _reached(plan: Plan) -> str:
    """The tolerance, and what was compared for it."""
    if plan.tolerance is None:
        return f"not judged: made without the {plan.target} device that it is for"
    said, j = f"{plan.tolerance:.1e} of the largest logit, against float64", plan.judged
    if not j:
        return said
    return (
        f"{said} (last {j['steps']} of {j['positions']} positions, slots {j['slots']}); keys of "
        f"all layers {j['keys']:.1e}, values {j['values']:.1e} of a layer's largest"
    )


@plan_app.command("show")
def plan_show(
    plan_file: PlanArg,
    source: Annotated[bool, typer.Option("--source", help="Show the generated C or CUDA.")] = False,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", help="Run a step; write its Perfetto trace."),
    ] = None,
    weights_dir: Annotated[
        Path | None, typer.Option("--weights-dir", metavar="DIR", help="Where the weights are now.")
    ] = None,
    json_file: JsonOpt = None,
) -> None:
    """Show what a plan is for, what it decided, and what was measured."""
    plan = read_plan(plan_file)
    if timeline is not None:
        made = _step_timeline(plan, weights_dir)
        timeline.write_text(json.dumps(made), encoding="utf-8")
    elif weights_dir is not None:
        raise UserError("--weights-dir of plan show is for --timeline: nothing else reads weights")
    if source:
        typer.echo(plan.source)
    else:
        m, w = plan.model, plan.workload
        lines = {
            "target": f"{plan.target}, {plan.cores} "
                      + ("blocks" if plan.target == "cuda" else "threads"),
            "machine": f"{plan.host.title or 'any'} ({plan.host.system}, {plan.host.machine})",
            "model": f"{m['family']}, {m['layers']} layers, hidden {m['hidden']}, "
                     f"{m['heads']}/{m['kv_heads']} heads of {m['head_dim']}, ffn {m['ffn']}, "
                     f"vocabulary {m['vocab']}, {'tied' if m['tied'] else 'separate'} head",
            "model digest": plan.model_digest,
            "weights": f"{plan.weights_path} ({len(plan.weights_digests)} files)",
            "workload": f"batch {w['batch']}, context {w['context']}, {w['weights']}"
                        + (f" in groups of {w['group']}" if "group" in w else "")
                        + (f", head {w['head']}" if "head" in w else ""),
            **_decided(plan),
            "memory": f"weights {show_bytes(plan.layout.total_bytes)}, "
                      f"cache {show_bytes(plan.cache.nbytes)}, "
                      f"scratch {show_bytes(plan.scratch_bytes)}",
            "kernel": f"{len(plan.source)} characters of source, "
                      f"{show_bytes(len(plan.binary))} built",
        }  # fmt: skip
        if plan.measured:
            step = plan.measured["step_seconds"]
            lines["measured"] = (
                f"{step * 1e3:.3f} ms a step at position {plan.measured['position']}"
            )
        lines["tolerance"] = _reached(plan)
        for name, value in lines.items():
            stdout().print(Text(f"{name:13s} {value}"), soft_wrap=True)
    _write_json(json_file, plan.manifest())


def _differences(
    plan: Plan, weights_dir: Path | None, steps: int
) -> tuple[list[Difference], float]:  # fmt: skip
    """What a plan's operators differ by, and the tolerance of its formats."""
    checkpoint = Checkpoint(require_weights(plan, weights_dir))
    means = stored(plan.layout, checkpoint.tensor, checkpoint.grouped, checkpoint.rows)
    if plan.target == "cpu":
        return compare(CpuSession.load(plan, weights_dir), means, steps), TOLERANCE
    CudaSession.require_here(plan)
    recorder = CudaSession.load(recording_plan(plan), weights_dir)
    found = compare_cuda(recorder, means, steps)
    recorder.close()
    return found, CUDA_TOLERANCE[plan.cache.format]


@plan_app.command("compare")
def plan_compare(
    plan_file: PlanArg,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Of each result's largest element [by the formats]."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps on random tokens.")] = 2,
    weights_dir: Annotated[
        Path | None, typer.Option("--weights-dir", metavar="DIR", help="Where the weights are now.")
    ] = None,
) -> None:
    """Compare every operator of a plan with its meaning in float64; name the first at fault."""
    found, usual = _differences(read_plan(plan_file), weights_dir, steps)
    bound = usual if tolerance is None else tolerance
    worst = {d.kind: max((x for x in found if x.kind is d.kind), key=lambda x: x.error)
             for d in found}  # fmt: skip
    for d in worst.values():
        stdout().print(Text(f"  worst {d}"), soft_wrap=True)
    first = first_beyond(found, bound)
    if first is None:
        stdout().print(f"{len(found)} results within {bound:.1e}")
        return
    stdout().print(Text(f"first beyond {bound:.1e}: {first}"), soft_wrap=True)
    raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command("synth")(synth)
    app.command("generate")(generate)
    app.add_typer(plan_app, name="plan")

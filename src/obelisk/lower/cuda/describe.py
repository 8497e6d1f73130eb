"""A lowered CUDA module as text for people: layouts, order, pipeline and memory of every kernel.

`plan_lines` takes what an emitter planned, `describe` a finished module; both give text. The same
module gives the same text. It is the CUDA half of what `obelisk show --lowered` prints.
"""

from __future__ import annotations

from obelisk.ir.block import Phase
from obelisk.lower.cuda.fragment import Fragments
from obelisk.lower.cuda.layout import Layout
from obelisk.lower.cuda.options import CudaModule, Pointer
from obelisk.lower.cuda.values import Values

_PHASES = {
    Phase.INVARIANT: "before the loop",
    Phase.LOOP: "each iteration",
    Phase.POST: "after the loop",
}


def layout_lines(layout: Layout) -> list[str]:
    """How a layout deals its axes to threads."""
    if not layout.order:
        return [f"layout {layout.name!r} of a single element"]
    out = [f"layout {layout.name!r}, neighbouring elements along axis {layout.order[-1]}"]
    for a in layout.order:
        d = layout.dims[a]
        cut = "" if d.axis.split is None else f" (or fewer, of {d.axis.split.full})"
        share = f", over {d.warps[0]} warps" if d.warps[0] > 1 else ""
        index = d.index.replace("{r}", "r")
        out.append(
            f"  axis {a} of {d.axis.extent}{cut}: registers r < {d.registers} of a thread hold "
            f"element {index}{share}"
        )
    return out


def order_lines(work: Values) -> list[str]:
    """Values in the order they are computed in; an operator used once is part of its user."""
    found: dict[Phase, list[str]] = {p: [] for p in _PHASES}
    for (node, layout), value in work.known.items():
        axes = ", ".join(map(str, value.axes)) or "none"
        found[work.when(node)].append(
            f"  {value.name} = {node.op.value} along axes {axes} in layout {layout.name!r}"
        )
    out = []
    for phase, title in _PHASES.items():
        if found[phase]:
            out += [f"{title}:", *found[phase]]
    return out


def pipeline_lines(work: Fragments) -> list[str]:
    """How a block's warps share the loop, and what lies where in shared memory."""
    product = "wgmma by four warps" if work.wide else "mma by a warp"
    out = [
        f"{work.groups} groups of {work.row_warps} row warps by {work.column_warps} column warps "
        f"take {work.block.loop} iterations in turn; products: {product}",
        f"pipeline: {work.buffers} slots of {work.moving} bytes a group, "
        f"{work.buffers if work.bulk else work.ahead} tiles in flight, filled by "
        f"{'bulk copies of a warp of its own' if work.bulk else '16-byte copies of all threads'}",
        f"shared memory: {work.shared_bytes()} bytes",
    ]
    if work.late:
        out.insert(
            1,
            f"products of {len(work.early)} begin an iteration, in front of the last one's final "
            f"{len(work.late)}",
        )
    for s in work.stages.values():
        lies = f"rows of {s.stride} bytes" if s.stride else "swizzled lines of 128 bytes"
        where = "of each slot" if s.loop else "of the block's own part"
        out.append(
            f"  in{s.node.attrs.index}: {s.height} by {s.width} {s.node.attrs.dtype}, {lies}, "
            f"at {s.offset} {where}"
        )
    if work.groups > 1:
        size = work.exchanged() - work.fixed
        out.append(f"  groups exchange {size} bytes at {work.fixed}, in the place of the slots")
    place = work.needed()
    for j, share in work.local.items():
        out.append(f"  parts {j} from the cluster: {share.size} bytes at {place}")
        place += share.size
    return out


def plan_lines(work: Values) -> tuple[str, ...]:
    """All that was decided for a kernel with its tiles in registers."""
    out = pipeline_lines(work) if isinstance(work, Fragments) else []
    layouts = dict.fromkeys(layout for _, layout in work.known)
    for layout in layouts:
        out += layout_lines(layout)
    return (*out, *order_lines(work))


def _pointer(p: Pointer) -> str:
    return f"{p.place.value}{p.index}" + (f"+{p.offset}" if p.offset else "")


def describe(module: CudaModule) -> str:
    """The whole module as text."""
    lines = [f"CUDA module {module.digest}", *module.notes]
    lines.append(f"{module.scratch_bytes} bytes of scratch memory, {module.counters} counters")
    for launch in module.launches:
        given = ", ".join(_pointer(p) for p in launch.arguments)
        lines.append(f"kernel {launch.kernel}({given})  # {launch.origin}")
    for i, k in enumerate(module.kernels):
        cluster = f" in clusters of {k.cluster}" if k.cluster > 1 else ""
        lines += [
            "",
            f"kernel {i}: {k.blocks} blocks of {k.threads} threads{cluster}, "
            f"{k.shared} bytes of shared memory",
            *(f"  {n}" for n in k.notes),
            *(f"  {n}" for n in k.plan),
        ]
    return "\n".join(lines) + "\n"

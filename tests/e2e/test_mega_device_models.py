"""On a GPU: real checkpoints, written by `transformers`, through `synth --device cuda` and a plan
file, against `transformers` in fp32 on the same weights.

Each of our tokens must be its own greedy choice at that place, or as good to within NEAR of the
largest logit: what 16-bit inputs of products move them by, or the order of fp32 sums.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.test_mega_trained import example
from tests.e2e.test_mega_transformers import CONTEXT, MODELS, PROMPT, model_of, worst_choice
from tests.mega_device import MACHINE, cache_of, prompts_of
from threadpoolctl import threadpool_limits

from obelisk.app.synth_cuda import make_cuda_plan, synthesise_cuda
from obelisk.base.errors import CallError
from obelisk.engine import Engine, Tokenizer
from obelisk.plan import write_plan
from obelisk.runtime import CudaSession
from obelisk.runtime.packing import pack
from obelisk.schedule.gpu_default import default_tiling
from obelisk.tasks import Workload, parse_config, parse_format

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.device

NEAR = {"bf16": 0.02, "fp16": 0.004, "fp32": 1e-5}  # of the largest logit


def engine_of(folder: Path, form: str = "bf16", context: int = CONTEXT) -> Engine:
    """Synthesised, written, loaded."""
    made = synthesise_cuda(
        folder / "m", Workload(1, context, parse_format(form)), MACHINE, profile=1
    )
    assert made.plan.tolerance is not None
    write_plan(made.plan, folder / "a.plan")
    return Engine.load(folder / "a.plan")


def largest(model: Any, ids: list[int]) -> float:
    """The largest logit of a text."""
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits.abs().max())


@pytest.mark.parametrize(
    ("name", "form"),
    [*((n, "bf16") for n in MODELS), ("llama3", "fp16"), ("qwen3-4b", "fp16"),
     *((n, "fp32") for n in MODELS)],
)  # fmt: skip
def test_256_greedy_tokens_are_those_of_transformers(name: str, form: str, tmp_path: Path) -> None:
    """Every family: llama3's rotary scaling and a tied head, biases, head norms, odd ratios."""
    model = model_of(tmp_path / "m", name if form == "fp32" else name + "-bf16")
    made = list(engine_of(tmp_path, form).generate([PROMPT], 256)[0].tokens)
    assert len(made) == 256
    assert len(set(made)) > 8, "a model that repeats itself shows nothing"
    assert worst_choice(model, PROMPT, made) <= NEAR[form] * largest(model, PROMPT + made)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine]:
    """The llama3 model (its rotary scaling begins at 64), and an engine for all of its context."""
    folder = tmp_path_factory.mktemp("long")
    model = model_of(folder / "m", "llama3-bf16")
    return model, engine_of(folder)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, CONTEXT - 1, CONTEXT])
def test_prompts_of_every_length_up_to_the_limit(
    length: int, outside: bool, long_model: tuple[Any, Engine]
) -> None:
    """In the kernel, and outside it from 32 tokens on: as many tokens as fit, each the model's."""
    model, usual = long_model
    engine = Engine(usual.session, 0 if outside else None)
    (prompt,) = prompts_of([length], 331, length)
    got = engine.generate([prompt], 16)[0]
    assert engine.timing.prefilled == (length - 1 if outside and 32 <= length < CONTEXT else 0)
    assert (len(got.tokens), got.reason) == (min(16, CONTEXT - length), "length")
    if got.tokens:
        made = list(got.tokens)
        assert worst_choice(model, prompt, made) <= NEAR["bf16"] * largest(model, prompt + made)


def test_beyond_the_limit_is_refused(long_model: tuple[Any, Engine]) -> None:
    """One token more than the context names both figures."""
    _, engine = long_model
    with pytest.raises(CallError, match=f"{CONTEXT + 1} tokens, the plan's context is {CONTEXT}"):
        engine.generate([[1] * (CONTEXT + 1)], 1)


def test_a_second_prompt_leaves_nothing_behind(long_model: tuple[Any, Engine]) -> None:
    """Prompts A, B, A: both runs of A are equal, and both are the model's choices."""
    model, engine = long_model
    a, b = prompts_of([70, 200], 331, 5)
    first = engine.generate([a], 32)[0]
    other = engine.generate([b], 32)[0]
    assert engine.generate([a], 32)[0] == first
    for prompt, got in ((a, first), (b, other)):
        made = list(got.tokens)
        assert worst_choice(model, prompt, made) <= NEAR["bf16"] * largest(model, prompt + made)


def test_a_model_trained_from_text_continues_it(tmp_path: Path) -> None:
    """The example's model, trained here: 256 tokens of a text are the model's own choices."""
    with threadpool_limits(1):  # small products: threads only wait for one another
        losses = example().main(tmp_path / "m", steps=120)
    assert np.mean(losses[-10:]) < losses[0] - 1.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():  # what the plan stores
        for w in model.parameters():
            w.copy_(w.half())
    prompt = Tokenizer(tmp_path / "m").encode("The search keeps")
    made = list(engine_of(tmp_path, "fp16", 300).generate([prompt], 256)[0].tokens)
    assert len(made) == 256
    assert worst_choice(model.eval(), prompt, made) <= NEAR["fp16"] * largest(model, prompt + made)


WIDE = {  # layers, hidden, heads, kv heads, head_dim, ffn
    "Qwen3-14B": (2, 5120, 40, 8, 128, 17408), "Qwen3-32B": (1, 5120, 64, 8, 128, 25600),
    "Llama-3.2-1B": (3, 2048, 32, 8, 64, 8192), "SmolLM2-135M": (4, 576, 9, 3, 64, 1536),
}  # fmt: skip
OFF = {"bf16": 2e-2, "fp32": 1e-5}  # of keys and values, by the norm


@pytest.fixture(params=[*((n, "bf16") for n in WIDE), ("Qwen3-14B", "fp32"),
                        ("Llama-3.2-1B", "fp32")])  # fmt: skip
def wide(request: pytest.FixtureRequest) -> Iterator[tuple[Any, CudaSession, int]]:
    """A few layers of a public model's shape in fp32 on the device, its weights rounded to bf16
    (or not), and our session of them.
    """
    name, form = request.param
    layers, hidden, heads, kv, dim, ffn = WIDE[name]
    family = "qwen3" if name.startswith("Qwen3") else "llama"
    config = transformers.AutoConfig.for_model(
        family, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=dim, intermediate_size=ffn, vocab_size=1003,
        tie_word_embeddings=False, max_position_embeddings=4096, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        generator = torch.Generator("cuda").manual_seed(1)
        with torch.no_grad():
            for w in model.parameters():
                noise = torch.randn(w.shape, generator=generator)
                noise = noise * (1.2 / w.shape[1] ** 0.5) if w.ndim == 2 else 1 + 0.2 * noise
                w.copy_(noise.bfloat16() if form == "bf16" else noise)
            model.model.embed_tokens.weight.mul_(32)
    plain = parse_config(config.to_dict())
    work = Workload(1, 640, parse_format(form))
    plan = make_cuda_plan(plain, work, default_tiling(plain, work, MACHINE), MACHINE)
    weights = dict(model.named_parameters())
    session = CudaSession(
        plan, pack(plan.layout, lambda name: weights[name].detach().cpu().numpy())
    )
    yield model, session, layers
    session.close()
    weights.clear()
    del model
    gc.collect()
    torch.cuda.empty_cache()


def test_shapes_of_public_models(wide: tuple[Any, CudaSession, int]) -> None:
    """Records R17 and R18: keys and values of every layer, of prompts in the kernel and outside it,
    then 32 greedy tokens, against transformers in fp32.
    """
    model, session, layers = wide
    form = session.plan.workload["weights"]
    for length, outside in ((12, False), (12, True), (600, True)):
        (prompt,) = prompts_of([length], 1003, length)
        with torch.no_grad():
            out = model(torch.tensor([prompt], device="cuda"), use_cache=True)
        session.reset()
        if outside:
            assert session.outside([prompt])
        else:
            session.prefill([prompt])
        for layer in range(layers):
            held = out.past_key_values.layers[layer]
            for ours, theirs in zip(cache_of(session), (held.keys, held.values), strict=True):
                want = theirs[0].float().cpu().numpy()
                off = ours[layer, 0, :, :length] - want
                assert np.linalg.norm(off) < OFF[form] * np.linalg.norm(want)
        session.reset()
        made = list(Engine(session).generate([prompt], 32)[0].tokens)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + made], device="cuda")).logits[0].double().cpu()
        at = length - 1 + torch.arange(len(made))
        ours = logits[at, torch.tensor(made)]
        assert float((logits[at].max(-1).values - ours).max()) <= NEAR[form] * float(
            logits.abs().max()
        )

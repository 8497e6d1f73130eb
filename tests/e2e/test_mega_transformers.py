"""Against `transformers` in fp32: checkpoints that it wrote, tokens that it would choose.

Our tokens are fed to its model in one pass, and each must be its own greedy choice at that place,
or as good to within EPSILON (a near-tie). So all steps are compared, those behind a tie too.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from obelisk.app.synth import synthesise
from obelisk.base.errors import CallError
from obelisk.engine import Engine, Tokenizer
from obelisk.plan import write_plan

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-torch.lock")
transformers = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'obelisk[dev]'"
)

torch.set_num_threads(1)
STEPS, EPSILON, CONTEXT = 256, 2e-3, 1024
PROMPT = [3, 141, 59, 26, 5]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
# family, then: hidden, heads, kv heads, head_dim (None: not said), ffn, tied, and what else differs
MODELS: dict[str, tuple[str, int, int, int, int | None, int, bool, dict[str, Any]]] = {
    "llama3": ("llama", 128, 8, 2, 16, 256, True, {"rope_parameters": LLAMA3}),
    "llama-biases": (
        "llama", 64, 4, 4, None, 176, False, {"attention_bias": True, "mlp_bias": True},
    ),
    "smollm2": ("llama", 72, 9, 3, None, 192, True, {"rms_norm_eps": 1e-5}),
    "mistral": ("mistral", 96, 6, 2, None, 224, False, {"sliding_window": None}),
    "qwen2.5-0.5b": ("qwen2", 112, 14, 2, None, 304, True, {}),
    "qwen3-4b": ("qwen3", 160, 8, 2, 32, 304, False, {}),
    "qwen3-0.6b": ("qwen3", 64, 4, 2, 32, 192, True, {}),
}  # fmt: skip


def model_of(folder: Path, name: str) -> Any:
    """A randomly initialised model that transformers saved in `folder`."""
    family, hidden, heads, kv, dim, ffn, tied, more = MODELS[name.removesuffix("-bf16")]
    half = name.endswith("-bf16")
    sizes = {} if dim is None else {"head_dim": dim}
    config = transformers.AutoConfig.for_model(
        family, hidden_size=hidden, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=ffn, vocab_size=331, tie_word_embeddings=tied,
        max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        **sizes, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # its own initial values are so small that one token repeats for ever
        for key, w in sorted(dict(model.named_parameters()).items()):
            noise = torch.randn(w.shape, generator=generator)
            if w.ndim == 2:
                # a large embedding that is also the head would choose the same token again
                w.copy_(noise * (0.3 if "embed" in key else 1.5 / w.shape[1] ** 0.5))
            else:
                w.copy_(noise * 0.3 + (1.0 if "norm" in key else 0.0))
            if half:
                w.copy_(w.bfloat16())
    if half:  # as most checkpoints are stored; what fp32 makes of them is the reference
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    else:
        model.save_pretrained(folder)
    return model


def worst_choice(model: Any, prompt: list[int], made: list[int]) -> float:
    """How much better than ours the model's own choice was, at the worst step."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made])).logits[0].double()
    at = len(prompt) - 1 + torch.arange(len(made))
    ours = logits[at, torch.tensor(made)]
    return float((logits[at].max(-1).values - ours).max())


@pytest.mark.parametrize("name", [*MODELS, "qwen3-0.6b-bf16"])
def test_256_greedy_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, compiler: str
) -> None:
    """Every family and odd ratio, from the directory that transformers wrote."""
    model = model_of(tmp_path / "m", name)
    made = synthesise(tmp_path / "m", context=CONTEXT, cores=2, profile=1)
    write_plan(made.plan, tmp_path / "a.plan")
    tokens = list(Engine.load(tmp_path / "a.plan").generate([PROMPT], STEPS)[0].tokens)
    assert len(tokens) == STEPS
    assert len(set(tokens)) > 8, "a model that repeats itself shows nothing"
    assert worst_choice(model, PROMPT, tokens) < EPSILON
    wrong = [*tokens[:100], (tokens[100] + 1) % 331, *tokens[101:]]
    assert worst_choice(model, PROMPT, wrong) > EPSILON


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory, compiler: str) -> tuple[Any, Engine]:
    """The llama3 model (its rotary scaling begins at 64), and an engine for all of its context."""
    folder = tmp_path_factory.mktemp("long")
    model = model_of(folder / "m", "llama3")
    made = synthesise(folder / "m", context=CONTEXT, cores=2, profile=1)
    write_plan(made.plan, folder / "a.plan")
    return model, Engine.load(folder / "a.plan")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, CONTEXT - 1, CONTEXT])
def test_prompts_of_every_length_up_to_the_limit(
    length: int, long_model: tuple[Any, Engine]
) -> None:
    """As many tokens as fit, each the model's choice; at the limit none, with reason "length"."""
    model, engine = long_model
    prompt = [int(t) for t in np.random.default_rng(length).integers(0, 331, length)]
    got = engine.generate([prompt], 16)[0]
    assert (len(got.tokens), got.reason) == (min(16, CONTEXT - length), "length")
    if got.tokens:
        assert worst_choice(model, prompt, list(got.tokens)) < EPSILON


def test_beyond_the_limit_is_refused(long_model: tuple[Any, Engine]) -> None:
    """One token more than the context names both figures."""
    _, engine = long_model
    with pytest.raises(CallError, match=f"{CONTEXT + 1} tokens, the plan's context is {CONTEXT}"):
        engine.generate([[1] * (CONTEXT + 1)], 1)


def test_a_second_prompt_leaves_nothing_behind(long_model: tuple[Any, Engine]) -> None:
    """Prompts A, B, A: both runs of A are equal, and both are the model's choices."""
    model, engine = long_model
    rng = np.random.default_rng(5)
    a, b = ([int(t) for t in rng.integers(0, 331, n)] for n in (70, 200))
    first = engine.generate([a], 32)[0]
    other = engine.generate([b], 32)[0]
    assert engine.generate([a], 32)[0] == first
    assert worst_choice(model, a, list(first.tokens)) < EPSILON
    assert worst_choice(model, b, list(other.tokens)) < EPSILON


def test_a_model_trained_from_text_continues_it(tmp_path: Path, compiler: str) -> None:
    """The example's model, trained here: 256 tokens of a text prompt are transformers' own."""
    path = Path(__file__).parents[2] / "examples" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny", path)
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    with threadpool_limits(1):  # small products: threads only wait for one another
        losses = tiny.main(tmp_path / "m", steps=120)
    assert np.mean(losses[-10:]) < losses[0] - 1.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    prompt = Tokenizer(tmp_path / "m").encode("The search keeps")
    made = synthesise(tmp_path / "m", context=300, cores=2, profile=1)
    write_plan(made.plan, tmp_path / "a.plan")
    tokens = list(Engine.load(tmp_path / "a.plan").generate([prompt], STEPS)[0].tokens)
    assert worst_choice(model.eval(), prompt, tokens) < EPSILON

import copy
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmp
from jaxmp import _devices

DTYPES = ["float32", "bfloat16", "float16", "float64"]
PRESETS = [
    "float32", "bfloat16", "float16", "float64", "mixed_bfloat16", "mixed_float16", "mixed_float8",
    "mixed_mxfp8",
]  # fmt: skip

dtypes = st.sampled_from(DTYPES)
patterns = st.text(st.characters(codec="utf-8"), max_size=8).map(lambda t: f"(?:{_escape(t)})+")


def _escape(text):
    return "".join(f"\\{c}" if not (c.isalnum() or c == "_") and c.isascii() else c for c in text)


def plain_policies():
    recipes = st.none() | st.from_regex(r"[A-Za-z]\w{0,6}", fullmatch=True)
    more = {"accum_dtype": dtypes, "reduce_dtype": dtypes, "recipe": recipes}
    return st.builds(jaxmp.Policy, dtypes, dtypes, dtypes, **more)


@st.composite
def policies(draw):
    rules = draw(st.lists(st.tuples(patterns, plain_policies()), max_size=3))
    return draw(plain_policies()).with_rules(rules)


@given(policies())
def test_text_round_trip(policy):
    again = jaxmp.get_policy(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == str(policy)
    assert eval(repr(policy), {"jaxmp": jaxmp}) == policy
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip(name):
    policy = jaxmp.get_policy(name)
    assert jaxmp.get_policy(str(policy)) == policy
    assert jaxmp.get_policy(policy) is policy


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("float32", ("float32", "float32", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("bfloat16", ("bfloat16",) * 3),
        ("half", ("float16",) * 3),
        ("full", ("float32",) * 3),
        ("c=f16", ("float32", "float16", "float16")),
        ("p=f16,c=bf16", ("float16", "bfloat16", "bfloat16")),
        ("p=bf16", ("bfloat16",) * 3),
        ("params=float32,compute=bfloat16,output=float32", ("float32", "bfloat16", "float32")),
        (" params = f32 , compute = half , output = full ", ("float32", "float16", "float32")),
        ("o=bf16", ("float32", "float32", "bfloat16")),
    ],
)
def test_grammar(text, want):
    policy = jaxmp.get_policy(text)
    got = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    assert got == tuple(np.dtype(jnp.dtype(name)) for name in want)
    assert all(type(dtype) is type(np.dtype(dtype)) for dtype in got)


def test_grammar_of_the_other_fields():
    text = 'p=f32,c=bf16,o=f32,accum=f64,reduce=bf16,recipe=mxfp8,rules=[["head", "float32"]]'
    policy = jaxmp.get_policy(text)
    assert policy.accum_dtype == jnp.float64
    assert policy.reduce_dtype == jnp.bfloat16
    assert policy.recipe == "mxfp8"
    assert policy.rules == (("head", jaxmp.get_policy("float32")),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mixed_bf16", "Did you mean 'mixed_bfloat16'?"),
        ("compute_float16", "Unknown dtype or preset 'compute_float16'"),
        ("flaot16", "Did you mean 'float16'?"),
        ("fp61", "Did you mean 'float16'?"),
        ("", "Unknown dtype or preset ''"),
        ("p=f32,comptue=f16", "Unknown key 'comptue'"),
        ("p=f32,comptue=f16", "Did you mean 'compute'?"),
        ("p=f32,params=f16", "Key 'params' stands twice"),
        ("p=f32,,c=f16", "Unknown key ''"),
        ("p=f32,c", "Unknown key 'c'"),
        ("c=int8", "Unknown dtype 'int8'"),
        ("c=float8_e4m3fn", "chosen by the policy's recipe"),
        ("p=f32,recipe=a b", "Bad recipe 'a b'"),
        ("p=f32,rules=head", "no JSON list"),
        ('p=f32,rules=[["(", "float32"]]', "'(' is no regular expression"),
        ('p=f32,rules=["head"]', "Bad rule 'head'"),
    ],
)
def test_bad_text_names_value_rule_and_remedy(text, words):
    with pytest.raises(ValueError, match=r"\w") as error:
        jaxmp.get_policy(text)
    assert words in str(error.value)


@given(st.text())
def test_any_text_is_a_policy_or_a_value_error(text):
    try:
        policy = jaxmp.get_policy(text)
    except ValueError:
        return
    assert jaxmp.get_policy(str(policy)) == policy


def test_other_bad_input():
    with pytest.raises(TypeError, match="A policy is text or a Policy, got None"):
        jaxmp.get_policy(None)
    with pytest.raises(ValueError, match="Rules do not nest"):
        jaxmp.Policy(rules={"a": jaxmp.Policy(rules={"b": "float32"})})
    with pytest.raises(ValueError, match="Unknown dtype 'int32'"):
        jaxmp.Policy(jnp.int32)
    with pytest.raises(ValueError, match="Bad recipe 3"):
        jaxmp.Policy(recipe=3)
    with pytest.raises(TypeError):
        jaxmp.Policy("f32", "f32", "f32", "f32")  # type: ignore[misc]
    with pytest.raises(AttributeError):
        jaxmp.Policy().param_dtype = jnp.float16


def test_equal_policies_are_equal_however_they_are_spelled():
    spellings = [
        jaxmp.Policy(),
        jaxmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32),
        jaxmp.Policy(np.float32, jnp.dtype("bfloat16"), "full"),
        jaxmp.get_policy("c=bf16,o=f32"),
        jaxmp.get_policy(jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)),
    ]
    assert len(set(spellings)) == 1
    assert len({str(policy) for policy in spellings}) == 1


def test_a_policy_is_static():
    policy = jaxmp.get_policy("mixed_float16").with_rules({"head": "float32"})
    assert jax.tree.leaves(policy) == []
    traces = []

    @jax.jit
    def fun(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    assert fun(policy, jnp.ones(2)).dtype == jnp.float16
    assert fun(jaxmp.get_policy(str(policy)), jnp.ones(2)).dtype == jnp.float16
    assert len(traces) == 1


def test_rules_by_path_the_last_match_wins():
    """Case B03: precision per instance, by path."""
    policy = jaxmp.Policy(
        rules={"head": "float32", "norm": "float32", "blocks/0/norm": "mixed_float16"}
    )
    params = {
        "blocks": [{"norm": {"scale": jnp.ones(2)}, "dense": {"kernel": jnp.ones(2)}}] * 2,
        "head": {"kernel": jnp.ones(2)},
    }
    got = policy.cast_to_compute(params)
    assert got["blocks"][0]["norm"]["scale"].dtype == jnp.float16
    assert got["blocks"][1]["norm"]["scale"].dtype == jnp.float32
    assert got["blocks"][0]["dense"]["kernel"].dtype == jnp.bfloat16
    assert got["head"]["kernel"].dtype == jnp.float32
    assert policy.for_path("blocks/3").rules == ()
    assert policy.unused_rules(["head/kernel", "norm"]) == ("blocks/0/norm",)
    assert policy.unused_rules([]) == ("head", "norm", "blocks/0/norm")


def test_with_rules_adds_and_wins():
    policy = jaxmp.Policy(rules={"a": "float32"}).with_rules([("a", "float16")])
    assert policy.for_path("a") == jaxmp.get_policy("float16")
    assert len(policy.rules) == 2


def test_a_rule_may_exclude_a_path():
    policy = jaxmp.Policy(rules={"ids$": "float32"})
    got = policy.cast_to_compute({"ids": jnp.ones(2), "x": jnp.ones(2)})
    assert (got["ids"].dtype, got["x"].dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize("param", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("output", ["float32", "bfloat16", "float16"])
def test_each_cast_gives_its_own_dtype(param, compute, output):
    """Case B06, policy part: storage, computation and output are three things."""
    policy = jaxmp.Policy(param, compute, output)
    for source in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.ones(3, source)
        assert policy.cast_to_param(x).dtype == jnp.dtype(param)
        assert policy.cast_to_compute(x).dtype == jnp.dtype(compute)
        assert policy.cast_to_output(x).dtype == jnp.dtype(output)
    assert policy.with_output_dtype("f16").output_dtype == jnp.float16


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "float64"])
def test_complex_keeps_its_imaginary_part(name):
    """Case B05."""
    policy, c = jaxmp.get_policy(name), jnp.array([1 + 2j, 3 - 4j, 5j], jnp.complex64)
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        got = cast({"w": jnp.ones(2), "c": c})
        assert got["c"].dtype == jnp.complex64
        np.testing.assert_array_equal(got["c"], c)


def device(platform, kind="", **attributes):
    return SimpleNamespace(platform=platform, device_kind=kind, **attributes)


@pytest.mark.parametrize(
    ("chip", "want", "words"),
    [
        (device("tpu", "TPU v5 lite"), "mixed_bfloat16", "TPU"),
        (device("gpu", "Tesla T4", compute_capability="7.5"), "mixed_float16", "loss scaling"),
        (device("gpu", "Tesla V100", compute_capability="7.0"), "mixed_float16", "7.0"),
        (device("gpu", "NVIDIA A100", compute_capability="8.0"), "mixed_bfloat16", "8.0"),
        (device("gpu", "NVIDIA B200", compute_capability="10.0"), "mixed_bfloat16", "10.0"),
        (device("gpu", "AMD MI300X", compute_capability="gfx942"), "mixed_bfloat16", "AMD"),
        (device("gpu", "some GPU"), "mixed_bfloat16", "not an NVIDIA GPU"),
        (device("metal", "Apple M3"), "float32", "not known"),
    ],
)  # fmt: skip
def test_recommended_policy_by_device(chip, want, words):
    got = jaxmp.recommend_policy(chip)
    assert got.policy == jaxmp.get_policy(want)
    assert words in got.reason


def test_recommended_policy_on_a_cpu_follows_its_flags():
    has_bf16 = bool(_devices.cpu_flags() & _devices.BF16_CPU_FLAGS)
    got = jaxmp.recommend_policy(jax.devices("cpu")[0])
    assert got.policy == jaxmp.get_policy("mixed_bfloat16" if has_bf16 else "float32")
    assert jaxmp.get_policy("auto") == jaxmp.recommend_policy().policy


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        (
            "processor : 0\nflags\t\t: fpu avx512_bf16 sse\nbugs : x\n",
            {"fpu", "avx512_bf16", "sse"},
        ),
        ("Features\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("nothing here", set()),
        ("", set()),
    ],
)
def test_cpu_flags_are_read_from_cpuinfo(cpuinfo, flags):
    assert _devices.parse_cpuinfo(cpuinfo) == flags

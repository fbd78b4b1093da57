"""Checkpoints through orbax: bits, dtypes, structure, kills (cases B47 and B49)."""

import pickle
import shutil
import signal
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jaxmp
import jaxmp.linen
from jaxmp import checkpoint
from jaxmp._checksum import checksum
from jaxmp.checkpoint import CheckpointDamagedError, CheckpointMismatchError
from jaxmp.optim import get_mixed_precision_state
from tests.test_mixed_precision import assert_same_bits
from tests.test_train import adamw, copy, linear_loss, make_batch, start

DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16",
    "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3",
    "float4_e2m1fn", "int2",
]  # fmt: skip


MSGPACK_LACKS = {"uint4", "int2", "float8_e8m0fnu", "float8_e4m3", "float4_e2m1fn"}


def every_dtype():
    rng = np.random.default_rng(0)
    tree = {}
    for name in DTYPES:
        dtype = jnp.dtype(name)
        is_float = name.startswith(("float", "bfloat", "complex"))
        values = np.abs(rng.normal(size=(3, 5))) if is_float else rng.integers(0, 2, (3, 5))
        tree[name] = jnp.asarray(values, jnp.float32).astype(dtype)
    tree["nan"] = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45])
    return tree


def test_every_dtype_bit_for_bit(tmp_path):
    """Case B49: fp8, int4 and bf16 leaves keep dtype and bits."""
    tree = every_dtype()
    checkpoint.save(tmp_path, tree, step=0)
    assert_same_bits(checkpoint.restore(tmp_path, tree), tree)
    shapes = jax.eval_shape(lambda t: t, tree)
    assert_same_bits(checkpoint.restore(tmp_path, shapes), tree)


def test_state_dicts_pickles_and_msgpack_keep_dtypes_and_bits():
    """Case B49: whatever Flax's msgpack knows; the states that users carry."""
    tree = {k: v for k, v in every_dtype().items() if k not in MSGPACK_LACKS}
    assert_same_bits(pickle.loads(pickle.dumps(tree)), tree)
    assert_same_bits(serialization.from_bytes(tree, serialization.to_bytes(tree)), tree)
    state = start(adamw(), ema=True, model_state={"m": jnp.ones(2, jnp.bfloat16)})
    for again in (
        pickle.loads(pickle.dumps(state)),
        serialization.from_bytes(state, serialization.to_bytes(state)),
        serialization.from_state_dict(state, serialization.to_state_dict(state)),
    ):
        assert_same_bits(again, state)
    broken = serialization.to_state_dict(state)
    del broken["ema_params"]
    with pytest.raises(ValueError, match=r"TrainState lacks \['ema_params'\]"):
        serialization.from_state_dict(state, broken)


def test_other_leaves(tmp_path):
    tree = {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "numpy": np.arange(3.0),
        "scalar": np.float64(2.5),
        "python": (1, 2.5, True, "text", float("nan"), 2**70, 1 + 2j, None),
        "odd/name": {"ä b.c": jnp.ones(2), "": jnp.ones(1)},
    }
    checkpoint.save(tmp_path, tree, step=3)
    got = checkpoint.restore(tmp_path, tree)
    chex.assert_trees_all_equal_structs(got, tree)
    for name in ("key", "keys"):
        assert got[name].dtype == tree[name].dtype
        assert_same_bits(jax.random.key_data(got[name]), jax.random.key_data(tree[name]))
    assert (got["empty"].shape, got["empty"].dtype) == ((0, 3), jnp.bfloat16)
    assert isinstance(got["numpy"], np.ndarray)
    assert (got["numpy"].dtype, type(got["scalar"])) == (np.float64, np.float64)
    assert str(got["python"]) == str(tree["python"])
    assert_same_bits(got["odd/name"], tree["odd/name"])


@pytest.mark.parametrize("root", [jnp.arange(3), {}, None, jaxmp.NoOpLossScale(), 5])
def test_small_trees(tmp_path, root):
    checkpoint.save(tmp_path, root, step=0)
    got = checkpoint.restore(tmp_path, root)
    assert jax.tree.structure(got) == jax.tree.structure(root)
    chex.assert_trees_all_equal(got, root)


def batch_with_overflow(i):
    batch = make_batch(i)
    return batch | {"x": batch["x"].at[0, 0].set(jnp.inf)} if i in (2, 3, 7) else batch


@pytest.mark.parametrize("inner", ["adamw", "MultiSteps"])
def test_ten_steps_and_ten_more_are_twenty(tmp_path, inner):
    """Case B47: bit for bit, overflows before the cut, accumulation cut in mid-window."""

    def loss_fn(params, batch, *, model_state, rng):
        noise = 0.1 * jax.random.normal(rng, batch["x"].shape, batch["x"].dtype)
        return jaxmp.LossOutput(
            linear_loss(params, batch | {"x": batch["x"] + noise}),
            model_state={"n": model_state["n"] + 1},
        )

    chain = optax.adamw(optax.warmup_constant_schedule(0.0, 0.01, 30))
    tx = jaxmp.mixed_precision(
        chain if inner == "adamw" else optax.MultiSteps(chain, 3),
        "mixed_float16",
        jaxmp.DynamicLossScale(2.0**10, period=3),
    )
    step = jaxmp.make_train_step(loss_fn, tx, "mixed_float16", ema_decay=0.9, microbatches=2)

    def fresh():
        return start(tx, model_state={"n": jnp.int32(0)}, rng=jax.random.key(5), ema=True)

    straight = fresh()
    for i in range(20):
        straight, info = step(straight, batch_with_overflow(i))
    assert int(info.skipped_steps) == 3
    cut = fresh()
    for i in range(10):
        cut, _ = step(cut, batch_with_overflow(i))
    path = checkpoint.save(tmp_path, cut)
    assert path.name == "10"
    compiled = step._cache_size()
    resumed = checkpoint.restore(tmp_path, fresh())
    for i in range(10, 20):
        resumed, info = step(resumed, batch_with_overflow(i))
    assert step._cache_size() == compiled, "a restored state is the same kind of state"
    assert int(info.skipped_steps) == 3

    def bits(state):
        return jax.tree.map(
            lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            state,
        )

    assert_same_bits(bits(resumed), bits(straight))


def test_a_template_of_another_dtype_lists_the_leaves(tmp_path):
    tree = {"a": jnp.ones(2), "b": {"c": jnp.full(2, 1 / 3, jnp.bfloat16)}, "n": jnp.int32(3)}
    checkpoint.save(tmp_path, tree, step=0)
    other = {"a": jnp.ones(2, jnp.bfloat16), "b": {"c": jnp.ones(2)}, "n": jnp.int32(0)}
    with pytest.raises(CheckpointMismatchError) as error:
        checkpoint.restore(tmp_path, other)
    assert "a: float32[2] in the checkpoint, bfloat16[2] in the template" in str(error.value)
    assert "b/c: bfloat16[2] in the checkpoint, float32[2] in the template" in str(error.value)
    assert "cast=True" in str(error.value)
    got = checkpoint.restore(tmp_path, other, cast=True)
    assert_same_bits(
        got, {"a": other["a"], "b": {"c": tree["b"]["c"].astype(jnp.float32)}, "n": tree["n"]}
    )
    for bad in (
        {"n": jnp.float32(0)},
        {"n": jnp.uint32(0)},
        {"n": 0},
        {"a": jnp.ones(3)},
        {"a": 1.0},
    ):
        with pytest.raises(CheckpointMismatchError, match="in the template"):
            checkpoint.restore(tmp_path, tree | bad, cast=True)
    checkpoint.save(tmp_path, {"k": jax.random.key(0)}, step=1)
    with pytest.raises(CheckpointMismatchError, match="key<rbg>"):
        checkpoint.restore(tmp_path, {"k": jax.random.key(0, impl="rbg")})


def test_another_structure_lists_the_leaves_and_loses_nothing(tmp_path):
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    checkpoint.save(tmp_path, tree, step=0)
    with pytest.raises(CheckpointMismatchError, match=r"c: not in the checkpoint\n  b: not in the"):
        checkpoint.restore(tmp_path, {"a": jnp.ones(2), "c": jnp.ones(3)})
    assert_same_bits(checkpoint.restore(tmp_path, tree), tree)


def test_a_checkpoint_without_a_loss_scale_loads_with_a_warning(tmp_path):
    """Case B47: from plain optax, and from a bf16 run, into an f16 one; and back."""
    chain = optax.adamw(1e-2)
    plain = jaxmp.TrainState.create({"w": jnp.full((4, 2), 0.25)}, chain)
    bf16, f16 = start(adamw("mixed_bfloat16")), start(adamw())
    saved = {"plain": plain, "bf16": copy(bf16), "f16": copy(f16)}
    for name, state in saved.items():
        moved = jax.tree.map(lambda x: x + jnp.ones_like(x) if x.ndim else x, state)
        checkpoint.save(tmp_path / name, moved, step=1)
    for name in ("plain", "bf16"):
        with pytest.warns(UserWarning, match="has no loss scale; the template's starts afresh"):
            got = checkpoint.restore(tmp_path / name, f16)
        found = get_mixed_precision_state(got)
        assert float(found.loss_scale.loss_scale) == 2.0**15
        assert float(found.inner_state[0].mu["w"][0, 0]) == 1.0
        assert float(got.params["w"][0, 0]) == (1.25 if name == "plain" else 1.5)
    with pytest.warns(UserWarning, match="that the template has no place for; it is dropped"):
        got = checkpoint.restore(tmp_path / "f16", bf16)
    assert float(get_mixed_precision_state(got).inner_state[0].mu["w"][0, 0]) == 1.0
    shapes = jax.eval_shape(lambda s: s, f16)
    with pytest.raises(CheckpointMismatchError, match="opt_state/loss_scale/loss_scale: not in"):
        checkpoint.restore(tmp_path / "bf16", shapes)


def test_options_come_from_the_template(tmp_path):
    checkpoint.save(tmp_path, jaxmp.DynamicLossScale(8.0, period=7), step=0)
    got = checkpoint.restore(tmp_path, jaxmp.DynamicLossScale(1.0, period=9))
    assert (float(got.loss_scale), got.period) == (8.0, 9)


def test_steps(tmp_path):
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "nowhere") is None
    for i in (1, 2, 5, 10):
        checkpoint.save(tmp_path, {"i": i}, step=i, keep=3)
    assert checkpoint.latest_step(tmp_path) == 10
    assert checkpoint.restore(tmp_path, {"i": 0}) == {"i": 10}
    assert checkpoint.restore(tmp_path, {"i": 0}, step=5) == {"i": 5}
    with pytest.raises(FileNotFoundError, match=r"of step 1 in .* Steps there: 2, 5, 10\."):
        checkpoint.restore(tmp_path, {"i": 0}, step=1)
    with pytest.raises(FileNotFoundError, match=r"Steps there: none\."):
        checkpoint.restore(tmp_path / "nowhere", {"i": 0})
    with pytest.raises(ValueError, match="Step 10 is not after step 10, the newest in"):
        checkpoint.save(tmp_path, {"i": 0}, step=10)
    assert checkpoint.restore(tmp_path, {"i": 0}) == {"i": 10}


def test_bad_input_writes_nothing(tmp_path):
    target = tmp_path / "new"
    with pytest.raises(
        ValueError, match="cannot be in a checkpoint:\n  f: builtin_function_or_method\n  o: obj"
    ):
        checkpoint.save(target, {"f": print, "o": object(), "w": jnp.ones(2)}, step=0)
    with pytest.raises(ValueError, match="Two leaves have one name"):
        checkpoint.save(target, {"a/b": 1, "a": {"b": 2}}, step=0)
    with pytest.raises(ValueError, match="has no step"):
        checkpoint.save(target, {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="step is -1"):
        checkpoint.save(target, start(adamw()), step=-1)
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.save(target, {"w": jnp.ones(2)}, step=0, keep=0)
    with pytest.raises(ValueError, match="cannot be in a checkpoint:\n  w: "):
        jax.jit(lambda w: checkpoint.save(target, {"w": w}, step=0))(jnp.ones(2))
    assert not target.exists()


def test_a_sharded_template_gets_its_sharding(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"w": jax.device_put(jnp.arange(8.0), sharding)}
    checkpoint.save(tmp_path, tree, step=0)
    for template in (tree, jax.eval_shape(lambda t: t, tree)):
        got = checkpoint.restore(tmp_path, template)
        assert_same_bits(got, tree)
    assert checkpoint.restore(tmp_path, tree)["w"].sharding == sharding


@pytest.mark.parametrize("name", [*DTYPES, "float64", "int64"])
def test_checksums_are_the_same_on_host_and_device_and_see_one_bit(name):
    with jax.enable_x64(True):
        array = every_dtype().get(name)
        array = jnp.arange(1.0, 16.0).astype(name).reshape(3, 5) if array is None else array
        host = np.array(array)
        want = checksum(host)
        if name not in ("float4_e2m1fn", "int2"):
            assert checksum(array) == want
        for where in (0, 7, 14):
            bits = host.copy().reshape(-1).view(np.uint8)
            bits[where * host.itemsize] ^= 1
            assert checksum(bits.view(host.dtype)) != want


def test_one_flipped_bit_is_found(tmp_path):
    tree = {"a": jnp.arange(4096.0), "b": {"c": jnp.ones(3, jnp.bfloat16)}}
    for step in (1, 2):
        checkpoint.save(tmp_path, tree, step=step)
    data = max((tmp_path / "2" / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)
    with pytest.raises(
        CheckpointDamagedError, match=r"Step 2 in .* is damaged(.|\n)*step="
    ) as error:
        checkpoint.restore(tmp_path, tree)
    assert "a" in str(error.value)
    assert_same_bits(checkpoint.restore(tmp_path, tree, step=1), tree)


@pytest.mark.parametrize("damage", ["truncate", "delete", "garbage"])
@pytest.mark.parametrize("part", ["manifest/metadata", "arrays"])
def test_damaged_files_are_reported(tmp_path, damage, part):
    checkpoint.save(tmp_path, {"a": jnp.arange(4096.0)}, step=1)
    path = tmp_path / "1" / part
    files = [path] if path.is_file() else [file for file in path.rglob("d/*") if file.is_file()]
    for file in files:
        if damage == "delete":
            file.unlink()
        else:
            contents = file.read_bytes()
            file.write_bytes(contents[: len(contents) // 2] if damage == "truncate" else b"\xff{")
    with pytest.raises(
        CheckpointDamagedError, match=r"Step 1 in .* is damaged, and is not restored"
    ):
        checkpoint.restore(tmp_path, {"a": jnp.zeros(4096)})


def test_no_checkpoint_is_lost_to_a_number(tmp_path):
    """A step after a roll back, a directory of others, numbers that are none."""
    tree = {"w": jnp.ones(2)}
    for step in (10, 20):
        checkpoint.save(tmp_path / "mine", tree, step=step)
    with pytest.raises(ValueError, match="Step 15 is not after step 20"):
        checkpoint.save(tmp_path / "mine", tree, step=15, keep=1)
    for bad in (4.5, "5", -3):
        with pytest.raises(ValueError, match="number is an integer from 0"):
            checkpoint.save(tmp_path / "mine", tree, step=bad)
    (tmp_path / "theirs" / "12").mkdir(parents=True)
    assert checkpoint.latest_step(tmp_path / "theirs") is None
    with pytest.raises(FileNotFoundError, match="Steps there: none"):
        checkpoint.restore(tmp_path / "theirs", tree)
    with pytest.raises(ValueError, match="holds 12, which jaxmp did not write"):
        checkpoint.save(tmp_path / "theirs", tree, step=13, keep=1)
    assert (tmp_path / "theirs" / "12").is_dir()


def test_numpy_scalars_and_empty_keys(tmp_path):
    tree = {
        "bool": np.bool_(True),
        "bf16": np.asarray(2, jnp.bfloat16)[()],
        "int": np.int64(2**40),
        "keys": jax.random.split(jax.random.key(0), 3)[:0],
    }
    checkpoint.save(tmp_path, tree, step=0)
    got = checkpoint.restore(tmp_path, tree)
    for name in ("bool", "bf16", "int"):
        assert type(got[name]) is type(tree[name])
        assert got[name] == tree[name]
    assert (got["keys"].shape, got["keys"].dtype) == ((0,), tree["keys"].dtype)
    for bad in (np.str_("a"), np.longdouble(1), np.array(["a"]), np.array([object()])):
        with pytest.raises(ValueError, match="cannot be in a checkpoint"):
            checkpoint.save(tmp_path, {"bad": bad}, step=1)
    with pytest.raises(ValueError, match="cannot be in a checkpoint:\n  f: "):
        checkpoint.restore(tmp_path, tree | {"f": print})


WRITER = """
import sys
import jax.numpy as jnp
from jaxmp import checkpoint

directory, first = sys.argv[1], int(sys.argv[2])
for step in range(first, first + 1000):
    state = {"w": jnp.full((512, 512), step, jnp.float32), "step": step}
    checkpoint.save(directory, state, step=step, keep=3)
    print(step, flush=True)
"""


def test_a_kill_in_the_middle_of_deleting_an_old_step_is_no_obstacle(tmp_path):
    state = {"w": jnp.ones(3)}
    for step in (1, 2):
        checkpoint.save(tmp_path, state, step=step)
    shutil.rmtree(tmp_path / "1" / "manifest")
    checkpoint.save(tmp_path, state, step=3)
    assert checkpoint.latest_step(tmp_path) == 3
    (tmp_path / "1" / "params").mkdir()
    with pytest.raises(ValueError, match="holds 1, which jaxmp did not write"):
        checkpoint.save(tmp_path, state, step=4)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_loses_nothing(tmp_path):
    template = {"w": jnp.zeros((512, 512)), "step": 0}
    first = 0
    for attempt in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            done = int(writer.stdout.readline())
            # Somewhere within the next writes, at another moment each time.
            time.sleep(0.037 * (attempt + 1))
            writer.send_signal(signal.SIGKILL)
            done = max([done, *(int(line) for line in writer.stdout.read().split())])
        latest = checkpoint.latest_step(tmp_path)
        assert latest >= done
        got = checkpoint.restore(tmp_path, template)
        assert got["step"] == latest
        np.testing.assert_array_equal(got["w"], np.full((512, 512), latest))
        first = latest + 1

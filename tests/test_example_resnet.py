"""The ResNet example: its data, its command line, and what its step runs on GPUs."""

import collections
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.audit._targets import TargetUnavailableError, parse_target, require_compiler

EXAMPLES = Path(__file__).parents[1] / "examples"

sys.path.insert(0, str(EXAMPLES))
images, run, resnet = (importlib.import_module(name) for name in ("_images", "_run", "resnet"))


def run_script(*args):
    command = [sys.executable, "-W", "error", str(EXAMPLES / "resnet.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = np.zeros((4, 3, 32, 32), np.uint8)
        pixels[:, 0] = 10 * i  # red
        pixels[0, :, 0, 1] = 255
        batch = {b"data": pixels.reshape(4, -1), b"labels": [i, i, i, i]}
        (folder / name).write_bytes(pickle.dumps(batch))
    return tmp_path


def test_digits_are_split_and_scaled():
    data = images.load_images(None)
    assert data.train.images.shape == (1500, 32, 32, 1)
    assert data.test.images.shape == (297, 32, 32, 1)
    assert (data.train.images.dtype, data.train.labels.dtype) == (np.float32, np.int32)
    assert abs(data.train.images.mean()) < 1e-4
    assert abs(data.train.images.std() - 1) < 1e-4
    assert not data.flips


def test_cifar_of_torchvision(cifar):
    data = images.load_images(cifar)
    assert (data.name, len(data.classes), data.flips) == ("CIFAR-10", 10, True)
    assert data.train.images.shape == (20, 32, 32, 3)
    assert data.train.labels.tolist() == sorted([0, 1, 2, 3, 4] * 4)
    assert data.test.labels.tolist() == [5] * 4
    # The white pixel is the second of the first row.
    assert np.argwhere(data.test.images[0, :, :, 1] > 1).tolist() == [[0, 1]]


def test_a_folder_without_cifar_is_an_error(tmp_path):
    with pytest.raises(run.UserError, match=r"no cifar-10-batches-py or cifar10 in it"):
        images.load_images(tmp_path)
    (tmp_path / "cifar10").mkdir()
    with pytest.raises(run.UserError, match="pip install tensorflow-datasets"):
        images.load_images(tmp_path)
    done = run_script("--data", tmp_path / "nothing")
    assert done.returncode == 2
    assert "resnet.py: error: --data" in done.stderr
    assert "Traceback" not in done.stderr


def test_augmented_images_are_shifted_and_mirrored():
    plain = jnp.arange(32.0 * 32).reshape(1, 32, 32, 1) * jnp.ones((16, 1, 1, 1))
    got = images.augmented(plain, jax.random.key(0), flips=True)
    assert got.shape == plain.shape
    mirrored = sum(bool(image[16, 20, 0] < image[16, 12, 0]) for image in got)
    assert 0 < mirrored < 16
    got = images.augmented(plain, jax.random.key(0), flips=False)
    assert all(bool(image[16, 20, 0] > image[16, 12, 0]) for image in got)
    assert len({float(image[16, 16, 0]) for image in got}) > 8


@pytest.mark.parametrize(
    ("option", "value"),
    [("--epochs", "0"), ("--policy", "mixed_flaot16"), ("--batch-size", "9999")],
)
def test_bad_options_are_errors_in_a_line(option, value, capsys):
    try:
        code = resnet.main([option, value, "--smoke"] if option != "--epochs" else [option, value])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert "resnet.py: error: " in capsys.readouterr().err


@pytest.mark.slow
def test_every_layer_computes_in_the_policy():
    step, args = resnet.audit_case(jaxmp.get_policy("mixed_float16"))
    report = jaxmp.audit(step, *args, target=None, policy="mixed_float16")
    report.assert_low_precision()
    assert {row.operand_dtypes for row in report.products} == {("float16", "float16")}
    assert {row.pass_name for row in report.products} == {"fprop", "dgrad", "wgrad"}
    state = args[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.model_state)} == {"float32"}


def test_a_skipped_step_keeps_the_batch_statistics(monkeypatch):
    monkeypatch.setitem(resnet.BLOCKS, 18, (1, 1))
    policy = jaxmp.get_policy("mixed_float16")
    model = jaxmp.linen.wrap(resnet.ResNet(width=4), policy)
    x, y = jax.random.normal(jax.random.key(0), (4, 16, 16, 1)), jnp.arange(4)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    tx = resnet.make_optimizer(policy, 10)
    state = jaxmp.TrainState.create(
        variables["params"], tx, model_state=variables["batch_stats"], rng=jax.random.key(1)
    )
    loss_fn = resnet.make_loss(model, flips=False)
    step = jaxmp.make_train_step(loss_fn, tx, policy, donate=False)
    state, info = step(state, (x, y))
    assert not info.skipped
    skipped, info = step(state, (x.at[0].set(jnp.inf), y))
    assert info.skipped
    for name in ("params", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(skipped, name), getattr(state, name))
    logits = model.apply({"params": skipped.params, "batch_stats": skipped.model_state}, x)
    assert jaxmp.all_finite(logits)


@pytest.mark.slow
def test_smoke(tmp_path):
    done = run_script("--smoke", "--policy", "float32,mixed_float16", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    for part in ("test accuracy", "float32", "mixed_float16"):
        assert part in done.stdout


@pytest.mark.audit
@pytest.mark.parametrize(
    ("target", "policy", "dtype"),
    [("cuda:h100", "mixed_bfloat16", "bf16"), ("cuda:t4", "mixed_float16", "f16")],
)
def test_all_convolutions_are_narrow_on(target, policy, dtype, monkeypatch):
    monkeypatch.setitem(resnet.BLOCKS, 50, (1, 1, 1, 1))  # a block of each width
    try:
        require_compiler(parse_target(target))
    except TargetUnavailableError as error:
        pytest.skip(str(error))
    step, args = resnet.audit_case(jaxmp.get_policy(policy))
    report = jaxmp.audit(step, *args, target=target, policy=policy, float32=False)
    report.assert_low_precision()
    report.assert_no_traps()
    kinds = collections.Counter(row.operand_dtypes for row in report.compiled.products)
    assert set(kinds) == {({"bf16": "bfloat16", "f16": "float16"}[dtype],) * 2}

"""The GPT example: its data, its model, its command line, and that Ctrl-C loses nothing."""

import dataclasses
import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--size", "tiny", "--steps", "90", "--batch-size", "4", "--policy", "mixed_float16"]


# The examples are scripts that import their neighbours, as Python does for `python gpt.py`.
sys.path.insert(0, str(EXAMPLES))
cli, run, sample, text, gpt = (
    importlib.import_module(name) for name in ("_cli", "_run", "_sample", "_text", "gpt")
)


def command(*args):
    return [sys.executable, "-W", "error", str(EXAMPLES / "gpt.py"), *map(str, args)]


def run_script(*args):
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def library(tmp_path):
    for index in range(60):
        folder = tmp_path / ("pkg" if index % 2 else "pkg/sub")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"m{index}.py").write_text(f"<file {index}>" + "x = 1\n" * 20)
    for skipped in ("test", "site-packages", "pkg/__pycache__", "pkg/tests"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "skipped.py").write_text("<skipped>")
    return tmp_path


def test_every_file_is_in_one_split(library):
    corpus = text.load_corpus(library)
    train, valid = corpus.train.tobytes(), corpus.valid.tobytes()
    for index in range(60):
        name = f"<file {index}>".encode()
        assert train.count(name) + valid.count(name) == 1
    assert b"skipped" not in train + valid
    assert 0 < len(valid) < len(train)


def test_the_order_of_the_text_is_fixed(library):
    assert text.source_files(library) == sorted(text.source_files(library))
    assert text.load_corpus(library).checksum == text.load_corpus(library).checksum


def test_one_tenth_of_the_standard_library_is_held_out():
    corpus = text.load_corpus()
    share = len(corpus.valid) / (len(corpus.train) + len(corpus.valid))
    assert 0.05 < share < 0.2


def test_a_folder_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="Only 0 Python sources"):
        text.load_corpus(tmp_path)


def test_a_batch_is_a_function_of_seed_and_step():
    data = np.arange(1000).astype(np.uint8)

    def batch(step, seed):
        return text.batch_at(data, step, seed=seed, batch_size=4, length=16)

    assert batch(3, 0).shape == (4, 17)
    assert batch(3, 0).dtype == np.int32
    np.testing.assert_array_equal(batch(3, 0), batch(3, 0))
    assert not np.array_equal(batch(3, 0), batch(4, 0))
    assert not np.array_equal(batch(3, 0), batch(3, 1))
    np.testing.assert_array_equal(np.diff(batch(3, 0)) % 256, 1)


def test_validation_batches_reach_from_the_first_byte_to_the_last():
    data = np.arange(250, dtype=np.uint8)
    batches = text.spread_batches(data, count=3, batch_size=2, length=16)
    assert [batch.shape for batch in batches] == [(2, 17)] * 3
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 249


@pytest.fixture(scope="module")
def tiny():
    size = gpt.SIZES["tiny"]
    return size, *gpt.make_model(size, seed=0)


def test_a_later_byte_does_not_change_earlier_logits(tiny):
    size, graphdef, params = tiny
    tokens = np.random.default_rng(0).integers(0, 256, (1, size.length), np.int32)
    changed = tokens.copy()
    changed[0, 40] ^= 1
    before, after = (gpt.nnx.merge(graphdef, params)(t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[0, :40], after[0, :40])
    assert not np.array_equal(before[0, 40], after[0, 40])


def test_all_products_take_the_compute_dtype(tiny):
    size, graphdef, params = tiny
    policy, loss_fn = jaxmp.get_policy("mixed_bfloat16"), gpt.make_loss(graphdef)

    tokens = np.zeros((2, size.length + 1), np.int32)
    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm relies on implicit promotion
        grad_fn = jax.value_and_grad(jaxmp.autocast(loss_fn, policy))
        lowered = jax.jit(grad_fn).lower(params, tokens)
    operands = re.findall(r"dot_general .*: \((.*)\) ->", lowered.as_text())
    assert len(operands) == 3 * (6 * size.depth + 1)  # fprop, dgrad and wgrad
    assert not [types for types in operands if "f32" in types]
    assert lowered.out_info[0].dtype == jnp.float32


def test_sampling_continues_the_prompt_past_the_context():
    def apply(params, tokens):
        return jax.nn.one_hot(tokens + params, 256) * 1e4

    sampled = sample.generate(apply, jnp.int32(1), b"ab", length=5, count=9)
    assert sampled == "abcdefghijk"


def test_policies_are_split_at_commas_but_not_within_a_text():
    texts = ["float32, mixed_bfloat16", "params=float32,compute=float16", "float32"]
    want = ["float32", "mixed_bfloat16", "params=float32,compute=float16"]
    assert cli.split_policies(texts) == want


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "mixed_bflot16"], "Did you mean 'mixed_bfloat16'?"),
        (["--policy", "mixed_mxfp9"], "Did you mean 'mixed_mxfp8'?"),
        (["--microbatches", "3"], "--microbatches 3 does not divide --batch-size 8"),
        (["--resume", "nowhere"], "No run to resume in nowhere"),
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--steps", "0"], "'0' is not an integer of at least 1"),
        (["--seed", "-1"], "'-1' is not an integer from 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["--size", "tiny", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def exit_code(args):
    try:
        return gpt.main(args)
    except SystemExit as error:
        return error.code


def write_manifest(directory, checksum=None):
    checksum = text.load_corpus().checksum if checksum is None else checksum
    run.Run(directory, cli.DEFAULTS, ["float32"], checksum).write()


def test_a_run_resumes_with_its_own_settings_only(tmp_path, capsys):
    write_manifest(tmp_path)
    assert gpt.main(["--resume", str(tmp_path), "--size", "tiny"]) == 2
    assert "--size is tiny, but the run in" in capsys.readouterr().err


def test_a_run_resumes_on_its_own_text_only(tmp_path, capsys):
    write_manifest(tmp_path, checksum=1)
    assert gpt.main(["--resume", str(tmp_path)]) == 2
    assert "another Python" in capsys.readouterr().err


def test_a_damaged_manifest_is_reported(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{")
    assert gpt.main(["--out", str(tmp_path)]) == 2
    assert "run.json is damaged" in capsys.readouterr().err


def test_a_finished_run_is_replaced_and_an_unfinished_one_is_not(tmp_path):
    settings = dataclasses.replace(cli.DEFAULTS, steps=3)
    old = run.new_run(tmp_path, settings, ["float32"], 1)
    old.write()
    jaxmp.checkpoint.save(tmp_path / "float32", {"w": jnp.zeros(1)}, step=2)
    with pytest.raises(run.UserError, match="not finished: continue it with --resume"):
        run.new_run(tmp_path, settings, ["float32"], 1)
    jaxmp.checkpoint.save(tmp_path / "float32", {"w": jnp.zeros(1)}, step=3)
    new = run.new_run(tmp_path, settings, ["mixed_bfloat16"], 1)
    assert (tmp_path / "float32").exists()
    new.write()
    assert not (tmp_path / "float32").exists()
    assert run.find_run(tmp_path).policies == ["mixed_bfloat16"]


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGINT)
    yield before
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_the_block(handler):
    seen = []

    def press_twice():
        with run.deferred_interrupt() as stop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            seen.append(stop.requested)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert seen == [True]
    signal.raise_signal(signal.SIGINT)  # the program is ending: nothing happens


def test_without_ctrl_c_the_handler_is_put_back(handler):
    with run.deferred_interrupt() as stop:
        assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_smoke(tmp_path):
    done = run_script("--smoke", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for part in ("val loss", "float32", "mixed_bfloat16", "+0.00%", str(tmp_path / "loss.png")):
        assert part in done.stdout
    assert "mixed_bfloat16: step 100/100" in done.stderr


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_here(*TINY, "--out", whole) == 0

    returncode, error = interrupt(command(*TINY, "--out", cut), after="step 30/")
    assert returncode == 130, error
    assert "Traceback" not in error
    assert f"--resume {cut}" in error
    assert 0 < jaxmp.checkpoint.latest_step(cut / "mixed_float16") < 90

    assert run_here(*TINY, "--out", cut) == 2
    assert "not finished" in capsys.readouterr().err
    done = run_script("--resume", cut)
    assert done.returncode == 0, done.stderr
    assert_same_checkpoints(whole, cut)

    assert run_here("--resume", cut) == 0
    assert capsys.readouterr().out == done.stdout


def run_here(*args):
    with jax.numpy_dtype_promotion("standard"):  # as in a process of its own
        return gpt.main(list(map(str, args)))


def interrupt(args, after):
    """Presses Ctrl-C twice once a line with `after` was printed; returns exit code and stderr."""
    with subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as p:
        lines = []
        for line in p.stderr:
            lines.append(line)
            if after in line or "Stopping" in line:
                p.send_signal(signal.SIGINT)
        return p.wait(timeout=60), "".join(lines)


def assert_same_checkpoints(one, other):
    leaves, others = (saved_leaves(run.find_run(folder)) for folder in (one, other))
    assert leaves.keys() == others.keys()
    for name in leaves.keys() - {"[1]['seconds']"}:
        np.testing.assert_array_equal(leaves[name], others[name], err_msg=name, strict=True)


def saved_leaves(saved):
    _, params = gpt.make_model(gpt.SIZES[saved.settings.size], seed=1)
    policy = jaxmp.get_policy("mixed_float16")
    tx = gpt.make_optimizer(policy, gpt.SIZES[saved.settings.size], saved.settings.steps)
    state, history = saved.load("mixed_float16", jaxmp.TrainState.create(params, tx))
    assert int(state.step) == saved.settings.steps
    assert 0 < int(jaxmp.optim.get_mixed_precision_state(state.opt_state).skipped_steps) < 40
    assert np.isfinite(history["loss"]).all()
    leaves = jax.tree_util.tree_leaves_with_path((state, history))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

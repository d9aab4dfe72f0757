"""Options come from flags, YAML and a resumed run, in that order, and bad ones are named."""

import argparse
import dataclasses

import pytest

from memferry_ascend.errors import ConfigError
from memferry_ascend.train import options


def from_flags(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    options.add_arguments(parser)
    return vars(parser.parse_args(words))


def test_defaults_leave_the_engine_its_own():
    assert options.resolve().engine_config() == {"accumulate": 1}


def test_flags_are_parsed():
    words = ["--lr", "3e-4", "--device-memory", "24GiB", "--keep-fp32", "ln,head"]
    o = options.resolve(from_flags(*words, "--assist-devices", "1,2", "--clip", "1", "--plain"))
    assert o.lr == 3e-4
    assert o.plain is True
    assert o.engine_config() == {
        "device_memory": 24 * 2**30,
        "keep_fp32": ("ln", "head"),
        "assist_devices": (1, 2),
        "max_grad_norm": 1.0,
        "accumulate": 1,
    }


def test_precedence_and_yaml_spellings(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "lr: 3e-4\nsteps: 7\nhost_memory: 1GiB\nkeep_fp32: [ln]\nwarmup: null\nplain: true\n"
    )
    o = options.resolve(
        from_flags("--steps", "9"), options.read_yaml(tmp_path / "c.yaml"), {"lr": 1.0, "seed": 3}
    )
    assert (o.lr, o.steps, o.seed, o.host_memory, o.keep_fp32, o.warmup, o.plain) == (
        3e-4,
        9,
        3,
        2**30,
        ("ln",),
        None,
        True,
    )


def test_options_survive_a_checkpoint():
    o = options.resolve({"keep_fp32": "a,b", "device_memory": "1GiB", "plain": "true", "lr": 1e-5})
    assert options.resolve(o.as_dict()) == o


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": "many"}, "--steps must be a whole number, not 'many'"),
        ({"steps": 1.5}, "--steps must be a whole number, not 1.5"),
        ({"steps": True}, "--steps must be a whole number, not True"),
        ({"steps": None}, "--steps must be a whole number, not None"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"lr": "nan"}, "--lr must be above 0"),
        ({"lr": -1}, "--lr must be above 0"),
        ({"max_grad_norm": 0}, "--clip must be above 0"),
        ({"seed": -1}, "--seed must be 0 or more"),
        ({"batch": 6, "accumulate": 4}, "--batch must be a multiple of 4"),
        ({"device_memory": "24G"}, "--device-memory: '24G' is ambiguous"),
        ({"precision": "fp16"}, "--precision must be bf16 or fp32, not 'fp16'"),
        ({"update": "later"}, "--update must be step or backward"),
        ({"plain": "perhaps"}, "--plain must be true or false"),
        ({"model": "gpt-2m"}, "unknown model preset 'gpt-2m': did you mean"),
    ],
)
def test_bad_values_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        options.resolve(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("planer: rules\n", "unknown key in .*c.yaml 'planer': did you mean 'planner'"),
        ("- a\n", "must hold `key: value` lines, not list"),
        ("", "not NoneType"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_bad_yaml_is_refused(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        options.read_yaml(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="cannot read --config"):
        options.read_yaml(tmp_path / "none.yaml")


def test_every_engine_setting_has_an_option():
    config = pytest.importorskip("memferry_ascend.config", reason="the engine is not in this tree")
    ours = {f.name for f in dataclasses.fields(options.TrainOptions) if f.metadata["engine"]}
    assert ours == {f.name for f in dataclasses.fields(config.Config)}

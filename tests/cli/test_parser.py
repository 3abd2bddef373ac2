"""The command line of `jaxllm serve`: spellings, old and missing flags, configuration files, exit statuses."""

import json
import logging
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from jaxllm.engine_args import EngineArgs
from jaxllm.text_side import build_text_side, find_model
from server.cli import main, make_serve_parser, parse_serve
from server.cli_argv import flag_names
from server.cli_engine import engine_args
from server.cli_flags import IGNORED, REFUSED, RENAMED, SHORT
from server.cli_server import serve_options


def args_of(*words: str) -> EngineArgs:
    return engine_args(parse_serve(words))


def refusal(*words: str) -> str:
    with pytest.raises(ValueError) as error:
        args_of(*words)
    return str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ("m", "--max-model-len", "4096"),
        ("m", "--max-model-len=4096"),
        ("m", "--max_model_len", "4K"),
        ("--max-model-len", "4096", "m"),
        ("--model", "m", "--max-model-len", "4096"),
        ("--model=m", "--max-request-len", "4096"),
    ],
)
def test_spellings(words):
    args = args_of(*words)
    assert (args.model, args.max_model_len) == ("m", 4096)


def test_every_engine_argument_has_a_flag():
    names = flag_names(make_serve_parser())
    assert {f"--{field.name.replace('_', '-')}" for field in fields(EngineArgs)} <= names


def test_defaults_are_those_of_the_python_api():
    assert args_of("m") == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--no-enable-prefix-caching",), "enable_prefix_caching", False),
        (("--enforce-eager",), "enforce_eager", True),
        (("--dtype", "half"), "dtype", "half"),
        (("-tp", "2"), "tensor_parallel_size", 2),
        (("--kv-cache-memory-bytes", "2G"), "kv_cache_memory_bytes", 2 << 30),
        (("--kv-cache-memory-bytes", "2g"), "kv_cache_memory_bytes", 2_000_000_000),
        (("--max-model-len", "auto"), "max_model_len", "auto"),
        (("--override-generation-config", '{"top_k": 3}'), "override_generation_config", {"top_k": 3}),
        (("--override-generation-config.top_k", "3"), "override_generation_config", {"top_k": 3}),
        (("--num-scheduler-steps", "4"), "num_decode_steps", 4),
    ],
)
def test_values(words, field, value):
    assert getattr(args_of("m", *words), field) == value


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_missing_feature_is_refused_with_a_way_out(flag):
    message = refusal("m", f"--{flag}=something")
    assert message.startswith(f"--{flag} is not supported: ") and len(message) > len(flag) + 40


@pytest.mark.parametrize("flag", sorted(flag for flag, refused in REFUSED.items() if refused.harmless))
def test_a_flag_that_asks_for_nothing_is_let_through(flag):
    assert args_of("m", f"--{flag}={REFUSED[flag].harmless[0]}") == EngineArgs(model="m")


@pytest.mark.parametrize("flag", sorted(IGNORED))
def test_a_flag_without_effect_is_named_in_the_log(flag, caplog):
    with caplog.at_level(logging.WARNING):
        assert args_of("m", f"--{flag}", *["x"] * IGNORED[flag].num_values) == EngineArgs(model="m")
    assert f"--{flag} does nothing" in caplog.text


def test_tables_name_only_what_the_parser_has_or_has_not():
    names = {name.removeprefix("--") for name in flag_names(make_serve_parser())}
    assert not names & (set(REFUSED) | set(IGNORED) | set(RENAMED))
    assert set(RENAMED.values()) <= names
    assert set(SHORT.values()) <= set(REFUSED)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("m", "--max-modle-len", "3"), ["unknown flag --max-modle-len", "--max-model-len"]),
        (("m", "--what-is-this"), ["unknown flag --what-is-this", "--help"]),
        (("m", "--max-num-seqs", "many"), ["--max-num-seqs", "many"]),
        (("m", "--max-num-seqs", "0"), ["max_num_seqs", "0"]),
        (("m", "--block-size", "7"), ["block_size must be a power of two", "7"]),
        (("m", "--block-size", "0"), ["block_size", "0"]),
        (("m", "--num-decode-steps", "0"), ["num_decode_steps", "0"]),
        (("m", "--max-model-len", "0"), ["max_model_len", "0"]),
        (("m", "--seed", "-1"), ["seed", "-1"]),
        (("m", "--dtype", "int3"), ["--dtype", "int3", "bfloat16"]),
        (("m", "--gpu-memory-utilization", "1.5"), ["gpu_memory_utilization", "1.5"]),
        (("m", "--override-generation-config", "{"), ["--override-generation-config"]),
        (("m", "--override-generation-config"), ["--override-generation-config needs a value"]),
        (("a", "--model", "b"), ["two models are named: a and --model b"]),
        (("--served-model-name", "a", "b"), ["no model is named", "--served-model-name"]),
    ],
)
def test_errors_say_what_is_wrong(words, parts):
    message = refusal(*words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("words", "part"),
    [(("--port", "99999"), "--port"), (("--shutdown-timeout", "-1"), "--shutdown-timeout"),
     (("--ssl-keyfile", "k"), "--ssl-certfile")],
)  # fmt: skip
def test_errors_of_the_http_side(words, part):
    with pytest.raises(ValueError, match=part):
        serve_options(parse_serve(["m", *words]), "m")


class TestConfigFile:
    def test_values_and_precedence(self, tmp_path: Path):
        file = tmp_path / "c.yaml"
        file.write_text(
            "model: from-file\nmax_model_len: 4K\nenforce-eager: true\nenable_prefix_caching: false\n"
            "served-model-name: [a, b]\noverride-generation-config: {top_k: 3}\nport: 9000\n"
        )
        options = parse_serve(["--config", str(file), "--port", "9001"])
        args, serving = engine_args(options), serve_options(options, "m")
        assert (args.model, args.max_model_len, args.enforce_eager) == ("from-file", 4096, True)
        assert (args.enable_prefix_caching, args.override_generation_config) == (False, {"top_k": 3})
        assert serving.port == 9001 and serving.settings.model_name == "a"
        assert engine_args(parse_serve(["mine", f"--config={file}"])).model == "mine"

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("max_modle_len: 3\nwhat: 4\n", "max-modle-len, what"),
            ("[1, 2]", "must hold `flag: value` lines"),
            ("a: [", "is no YAML"),
            ("quantization: awq", "--quantization is not supported"),
            ("max_num_seqs: many", "--max-num-seqs"),
        ],
    )
    def test_errors(self, tmp_path: Path, text: str, part: str):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        assert part in refusal("m", "--config", str(file))

    def test_missing(self, tmp_path: Path):
        assert "No such file" in refusal("m", "--config", str(tmp_path / "none.yaml"))


class TestExitStatus:
    """What the shell sees: nothing of a traceback."""

    def test_bad_flag(self, capsys):
        assert main(["serve", "m", "--nope"]) == 2
        assert capsys.readouterr().err == "jaxllm: error: unknown flag --nope; --help lists all\n"

    def test_no_command(self, capsys):
        assert main([]) == 2
        assert "serve" in capsys.readouterr().out

    def test_unknown_command(self, capsys):
        assert main(["sevre"]) == 2
        assert "serve" in capsys.readouterr().err

    def test_port_in_use(self, capsys):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            assert main(["serve", "m", "--host", "127.0.0.1", "--port", str(port)]) == 1
        assert f"port {port}: Address already in use; choose another with --port" in capsys.readouterr().err

    def test_no_such_model(self, tmp_path, capsys):
        assert main(["serve", str(tmp_path / "none"), "--port", "0"]) == 1
        error = capsys.readouterr().err
        assert "no such folder or file" in error and "Traceback" not in error


@pytest.mark.parametrize("module", ["jaxllm.entrypoints.api_server", "jaxllm.entrypoints.openai.api_server"])
def test_modules_under_the_names_of_vllm(module, tmp_path):
    command = [sys.executable, "-m", module, "--model", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}" in done.stderr and "old spelling" not in done.stderr and "Traceback" not in done.stderr


def test_help_is_quick_and_names_the_flags():
    code = "import sys, server.cli; status = 0\ntry: server.cli.main(['serve', '--help'])\nexcept SystemExit as e: pass"
    code += "\nassert not {'jax', 'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert all(name in done.stdout for name in ("--max-model-len", "--port", "--enable-prefix-caching"))


BENCH_CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48,
    num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=64,
)  # fmt: skip


class TestBench:
    @pytest.fixture
    def flags(self, tmp_path: Path) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(BENCH_CONFIG))
        return [
            str(tmp_path), "--load-format", "dummy", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "4",
            "--kv-cache-memory-bytes", "1M", "--compile-cache-dir", "", "--output-json", str(tmp_path / "out.json"),
        ]  # fmt: skip

    def test_latency(self, flags, tmp_path, capsys):
        words = ["--input-len", "5", "--output-len", "6", "--batch-size", "2", "--num-iters", "2"]
        assert main(["bench", "latency", *flags, *words]) == 0
        report = json.loads((tmp_path / "out.json").read_text())
        assert report["figures"]["compiles"] == 0 and report["figures"]["iterations"] == 2
        assert report["versions"].keys() == {"jaxllm", "jax", "jaxlib", "flax"} and report["date"]
        assert "launches_per_step" in capsys.readouterr().out

    def test_throughput(self, flags, tmp_path):
        words = ["--input-len", "5", "--output-len", "6", "--num-prompts", "6", "--subtract-prefill"]
        assert main(["bench", "throughput", *flags, *words, "--random-range-ratio", "0.2"]) == 0
        figures = json.loads((tmp_path / "out.json").read_text())["figures"]
        assert figures["requests"] == 6 and 6 * 5 <= figures["output_tokens"] <= 6 * 7
        assert figures["decode_only_tokens_per_s"] > 0

    def test_workloads_that_cannot_be(self, flags, capsys):
        assert main(["bench", "latency", *flags, "--input-len", "0"]) == 2
        assert main(["bench", "latency", *flags, "--input-len", "60", "--output-len", "60"]) == 2
        error = capsys.readouterr().err
        assert "--input-len must be at least 1, got 0" in error and "do not fit max_model_len 64" in error


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size must be int, got '2'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be int or None"),
        ({"enforce_eager": "no"}, "enforce_eager must be bool"),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization must be float"),
        ({"seed": True}, "seed must be int"),
    ],
)
def test_wrong_types_of_engine_arguments(values, words):
    with pytest.raises(ValueError, match=words):
        EngineArgs(model="m", **values)
    assert EngineArgs(model="m", gpu_memory_utilization=1, override_generation_config={"top_k": 1}).swap_space == 0.0


@pytest.mark.parametrize(
    ("override", "words"),
    [({"temperature": -5}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"bogus": 1}, "bogus"),
     ({"eos_token_id": "x"}, "eos_token_id")],
)  # fmt: skip
def test_sampling_defaults_that_no_request_could_use(tmp_path, override, words):
    (tmp_path / "config.json").write_text(json.dumps(BENCH_CONFIG))
    args = EngineArgs(model=str(tmp_path), load_format="dummy", override_generation_config=override)
    with pytest.raises(ValueError, match=words):
        build_text_side(args, find_model(args))


def test_architectures_must_be_a_list(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BENCH_CONFIG | {"architectures": "LlamaForCausalLM"}))
    with pytest.raises(ValueError, match="architectures must be a list"):
        find_model(EngineArgs(model=str(tmp_path), load_format="dummy"))

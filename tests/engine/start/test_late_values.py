"""Values that vLLM reads late: what is right passes the checks. What is wrong has rows in
tests/cli/wrong_usages.py, tried at every door."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.engine.start.late_values import check_engine, check_server, load_parsers
from sipipe.errors import ConfigError


def server(**values):
    fields = {"enable_lora": True, "max_lora_rank": 16, "fingerprint_value": None}
    return SimpleNamespace(**fields | values)


def engine(**values):
    fields = {"logits_processors": None, "io_processor_plugin": None, "generation_config": "auto"}
    fields |= {"allowed_local_media_path": ""} | values
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        parallel_config=SimpleNamespace(worker_extension_cls=values.get("extension", "")),
        load_config=SimpleNamespace(model_loader_extra_config={}),
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",  # a tag of transformers
        "{{ raise_exception('no') }}",
        "llama-2",  # a name, which vLLM looks up
    ],
)
def test_a_chat_template_that_vllm_takes_is_taken(template, tmp_path):
    check_server(server(chat_template=template))
    file = tmp_path / "template.jinja"
    file.write_text(template)
    check_server(server(chat_template=str(file)))


def test_a_template_that_is_not_text_is_named(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--chat-template .* is not UTF-8 text"):
        check_server(server(chat_template=str(file)))


@pytest.mark.parametrize("fields", [{"r": 16}, {"r": 8, "target_modules": ["q_proj"]}, {}])
def test_an_adapter_within_the_rank_is_taken(tmp_path, fields):
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    adapter = SimpleNamespace(name="a", path=str(tmp_path))
    check_server(server(lora_modules=[adapter]))
    check_server(server(lora_modules=[SimpleNamespace(name="a", path="org/of-the-hub")]))


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_an_adapters_file_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--lora-modules a: .*adapter_config.json\" is no JSON"):
        check_server(server(lora_modules=[SimpleNamespace(name="a", path=str(tmp_path))]))


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too long for a socket's path: 107 bytes"):
        check_server(server(uds=str(tmp_path / ("x" * 107))))


def test_a_time_that_the_kernel_cannot_wait_is_refused():
    check_server(server(shutdown_timeout=10**6))
    with pytest.raises(ConfigError, match="--shutdown-timeout must be at most 1000000 seconds"):
        check_server(server(shutdown_timeout=10**6 + 1))


@pytest.mark.parametrize("field", ["allowed_origins", "allowed_methods", "allowed_headers"])
def test_what_other_sites_may_do_is_a_list(field):
    check_server(server(**{field: ["GET"]}))
    check_server(server(**{field: "*"}))
    for value in (5, None, {"a": 1}, [1], "GET"):
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} must be a JSON list"):
            check_server(server(**{field: value}))


def test_a_file_of_a_user_without_a_home_is_named():
    with pytest.raises(ConfigError, match=r'--ssl-keyfile "~nobody-is/x" cannot be read: No such'):
        check_server(server(ssl_keyfile="~nobody-is/x"))


def test_what_is_right_passes(tmp_path):
    check_server(
        server(
            ssl_cert_reqs=2,
            ssl_ciphers="ECDHE+AESGCM",
            api_key=["", "key"],
            uds=str(tmp_path / "socket"),
            fingerprint_mode="custom",
            fingerprint_value="mine",
            default_chat_template_kwargs={"enable_thinking": False},
        )
    )
    check_engine(engine(extension="collections.OrderedDict", generation_config=str(tmp_path)))
    check_engine(engine(logits_processors=["collections:OrderedDict", dict]))
    check_engine(engine(allowed_local_media_path=str(tmp_path), generation_config="vllm"))


def test_a_parsers_plugin_registers_it(tmp_path):
    from vllm.tool_parsers import ToolParserManager

    file = tmp_path / "plugin_of_a_test.py"
    file.write_text(
        "from vllm.tool_parsers import ToolParser, ToolParserManager\n"
        "@ToolParserManager.register_module('parser_of_a_test')\n"
        "class Parser(ToolParser): pass\n"
    )
    for _ in range(2):  # vLLM imports it once more
        load_parsers(server(tool_parser_plugin=str(file)))
    assert "parser_of_a_test" in ToolParserManager.list_registered()

"""Values that vLLM looks at when its engine, its workers or its server have started, checked in the
foreground: that is half a minute earlier, and one line instead of a traceback of another process.
"""

import json
import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import isclass, iscoroutinefunction
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from vllm.utils.import_utils import import_from_path

from sipipe.engine.setup.checkpoint import check_path
from sipipe.environment import LONGEST_SOCKET
from sipipe.errors import ConfigError, one_line

FILES = ("tool_parser_plugin", "reasoning_parser_plugin")
"""Arguments that name a module's file."""
CERTIFICATES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
CROSS_ORIGIN = ("allowed_origins", "allowed_methods", "allowed_headers")
"""Arguments that are lists, of which vLLM's parser takes any JSON."""
LONGEST_SHUTDOWN = 10**6
"""Seconds of ``--shutdown-timeout``, at most: 11 days. A wait of 300 years is none that the kernel takes,
and the server would fail when it is told to end."""


def check_server(args: Any) -> None:
    """Check what the server's parsed arguments name: middleware, plugins of parsers, certificates, chat
    templates, adapters, sockets, keys. Raises ConfigError, which names the option."""
    if (getattr(args, "shutdown_timeout", None) or 0) > LONGEST_SHUTDOWN:
        raise ConfigError(f"--shutdown-timeout must be at most {LONGEST_SHUTDOWN} seconds")
    for name in getattr(args, "middleware", None) or ():
        _check_middleware(name)
    for field in (*FILES, *CERTIFICATES):
        path = getattr(args, field, None)
        if path:
            _check_file(path, _option(field))
    if getattr(args, "ssl_certfile", None):
        _check_certificate(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    elif getattr(args, "ssl_keyfile", None):
        raise ConfigError("--ssl-keyfile: give its --ssl-certfile too")
    _check_encryption(args)
    if getattr(args, "chat_template", None):
        _check_template(args.chat_template)
    if getattr(args, "tool_server", None):
        _check_tool_server(args.tool_server)
    if getattr(args, "uds", None):
        _check_socket(args.uds)
    for field in CROSS_ORIGIN:
        _check_cross_origin(getattr(args, field, ["*"]), _option(field))
    keys = getattr(args, "api_key", None)
    if keys and not any(keys):  # vLLM leaves empty keys out, and would then ask nobody for one
        raise ConfigError("--api-key is empty: give a key, or leave the option out")
    if getattr(args, "fingerprint_mode", "") == "custom" and not args.fingerprint_value:
        raise ConfigError("--fingerprint-mode custom: give its --fingerprint-value too")
    template_arguments = getattr(args, "default_chat_template_kwargs", None)
    if template_arguments is not None and not isinstance(template_arguments, dict):
        raise ConfigError("--default-chat-template-kwargs must be a JSON object")
    for adapter in getattr(args, "lora_modules", None) or ():
        _check_adapter(adapter, args)


def check_engine(vllm_config: Any) -> None:
    """Check what the engine's configuration names, and its processes would look for: classes, plugins,
    directories. Raises ConfigError, which names the option."""
    model = vllm_config.model_config
    for name in model.logits_processors or ():
        if isinstance(name, str):
            _check_class(name, "--logits-processors", separator=":")
    extension = vllm_config.parallel_config.worker_extension_cls
    if extension:
        _check_class(extension, "--worker-extension-cls")
    if model.io_processor_plugin:
        _check_plugin(model.io_processor_plugin)
    media = model.allowed_local_media_path
    if media and not Path(media).is_dir():
        raise ConfigError(f'--allowed-local-media-path "{media}": there is no such directory')
    if model.generation_config not in ("auto", "vllm"):
        # vLLM would go on with its own defaults.
        check_path(model.generation_config, "--generation-config")
    _check_loader(vllm_config.load_config)


def load_parsers(args: Any) -> None:
    """Import the plugins of parsers, which register theirs. Raises ConfigError: one cannot be imported;
    vLLM would go on without it."""
    for field in FILES:
        path = getattr(args, field, None)
        if path:
            _check_file(path, _option(field))
            module = partial(import_from_path, Path(path).stem, path)
            _attempt(module, f"{_option(field)} {path}")


def _attempt(call: Callable[[], Any], option: str) -> Any:
    """Return what ``call`` returns. Raises ConfigError: the option, and what ``call`` raised."""
    try:
        return call()
    except Exception as error:  # whatever a module of the user raises
        reason = one_line(error)
        raise ConfigError(f"{option}: {reason}") from None


def _option(field: str) -> str:
    """The option of an argument's ``field``."""
    return f"--{field.replace('_', '-')}"


def _check_middleware(name: str) -> None:
    """Import the middleware ``name``, as the server does later, in the same process."""
    module, dot, member = name.rpartition(".")
    if not dot:
        raise ConfigError(f"--middleware {name}: must be MODULE.NAME, a class or an async function")
    middleware = _attempt(lambda: getattr(import_module(module), member), f"--middleware {name}")
    if not (isclass(middleware) or iscoroutinefunction(middleware)):
        raise ConfigError(f"--middleware {name} is neither a class nor an async function")


def _check_file(path: str, option: str) -> None:
    """Check that a file can be read."""
    try:
        # Not the path's own `expanduser`, which raises RuntimeError where a user has no home.
        with open(os.path.expanduser(path), "rb"):
            pass
    except OSError as error:
        raise ConfigError(f'{option} "{path}" cannot be read: {error.strerror}') from None


class _NeedsPasswordError(Exception):
    """The key is encrypted: the server asks for the password when it begins to listen."""


def _check_certificate(certificate: str, key: str | None, authorities: str | None) -> None:
    """Check that a certificate and its key belong together, and that those of authorities are some."""

    def password() -> str:
        raise _NeedsPasswordError

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        with suppress(_NeedsPasswordError):
            context.load_cert_chain(certificate, key, password)
    except OSError as error:  # ssl.SSLError is one
        pair = f'--ssl-certfile "{certificate}"'
        if key:
            pair += f', --ssl-keyfile "{key}"'
        reason = getattr(error, "reason", None) or "not PEM"
        raise ConfigError(f"{pair} do not make a certificate with its key: {reason}") from None
    if authorities:
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            reason = getattr(error, "reason", None) or "not PEM"
            raise ConfigError(
                f'--ssl-ca-certs "{authorities}": no certificates: {reason}'
            ) from None


def _check_encryption(args: Any) -> None:
    """Check the numbers and names that ``ssl`` takes. Raises ConfigError."""
    required = getattr(args, "ssl_cert_reqs", None)
    if required is not None and required not in tuple(ssl.VerifyMode):
        modes = ", ".join(f"{mode.value} ({mode.name})" for mode in ssl.VerifyMode)
        raise ConfigError(f"--ssl-cert-reqs {required}: must be one of {modes}")
    ciphers = getattr(args, "ssl_ciphers", None)
    if ciphers:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"--ssl-ciphers {ciphers}: names no cipher that OpenSSL has"
            ) from None


def _check_template(template: str) -> None:
    """Parse a chat template, which is a file's or the text itself. vLLM compiles it for the first
    request. Tags of others' extensions are let pass: only transformers knows them."""
    path = Path(template)
    try:
        text = (
            path.read_text(encoding="utf-8") if "{" not in template and path.is_file() else template
        )
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(text)
    except OSError as error:
        raise ConfigError(
            f'--chat-template "{template}" cannot be read: {error.strerror}'
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f'--chat-template "{template}" is not UTF-8 text') from None
    except TemplateError as error:
        if "unknown tag" not in str(error):
            shown = " ".join(str(error).split())
            raise ConfigError(f"--chat-template {template}: {shown}") from None


def _check_tool_server(servers: str) -> None:
    package = "gpt_oss" if servers == "demo" else "mcp"
    if find_spec(package) is None:
        raise ConfigError(f"--tool-server {servers}: the package {package} is not installed")
    for server in () if servers == "demo" else servers.split(","):
        host, colon, port = server.partition("/")[0].rpartition(":")
        if not (host and colon and port.isdecimal()):
            raise ConfigError(f'--tool-server "{server}" must be HOST:PORT, several with commas')


def _check_cross_origin(words: Any, option: str) -> None:
    """Check what the server's answers to other sites' pages are made of, when it begins to serve."""
    if words != "*" and not (
        isinstance(words, list) and all(isinstance(word, str) for word in words)
    ):
        raise ConfigError(f'{option} must be a JSON list such as ["*"], not {words!r:.60}')


def _check_socket(path: str) -> None:
    folder = Path(path).parent
    if not folder.is_dir():
        raise ConfigError(f"--uds {path}: there is no directory {folder}")
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        raise ConfigError(f"--uds {path}: too long for a socket's path: {LONGEST_SOCKET} bytes")


def _check_adapter(adapter: Any, args: Any) -> None:
    """Check a LoRA adapter's own file, where its directory is here and not on the hub."""
    option = f"--lora-modules {adapter.name}"
    if not args.enable_lora:
        raise ConfigError(f"{option}: give --enable-lora too")
    folder = Path(adapter.path).expanduser()
    if not folder.is_dir():
        return
    file = folder / "adapter_config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f'{option}: "{file}" cannot be read: {error.strerror}') from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f'{option}: "{file}" is no JSON object')
    rank = fields.get("r")
    if isinstance(rank, int) and rank > args.max_lora_rank:
        raise ConfigError(
            f"{option} has rank {rank}, and --max-lora-rank is {args.max_lora_rank}: raise it"
        )


def _check_class(name: str, option: str, separator: str = ".") -> None:
    module, mark, member = name.rpartition(separator)
    if not mark:
        raise ConfigError(f"{option} {name}: must be MODULE{separator}CLASS")
    if not isclass(_attempt(lambda: getattr(import_module(module), member), f"{option} {name}")):
        raise ConfigError(f"{option} {name} is no class")


def _check_plugin(name: str) -> None:
    installed = [entry.name for entry in entry_points(group="vllm.io_processor_plugins")]
    if name not in installed:
        names = ", ".join(installed) or "none"
        raise ConfigError(f"--io-processor-plugin {name} is not installed (there are: {names})")


def _check_loader(load_config: Any) -> None:
    """Make the object that reads weights, which checks its own options."""
    if not load_config.model_loader_extra_config:
        return
    from vllm.model_executor.model_loader import get_model_loader

    _attempt(lambda: get_model_loader(load_config), "--model-loader-extra-config")

"""Files and modules that vLLM's server looks at when it begins to listen, checked in the foreground.

That is half a minute earlier, and one line instead of a traceback of another process.
"""

import ssl
from contextlib import suppress
from importlib import import_module
from inspect import isclass, iscoroutinefunction
from pathlib import Path
from typing import Any

from sipipe.errors import ConfigError

FILES = ("tool_parser_plugin", "reasoning_parser_plugin")
"""Arguments that name a module's file."""
CERTIFICATES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def check_server(args: Any) -> None:
    """Check what the server's parsed arguments name: middleware, plugins of parsers, certificates.
    Raises ConfigError, which names the option."""
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


def _option(field: str) -> str:
    """The option of an argument's ``field``."""
    return f"--{field.replace('_', '-')}"


def _check_middleware(name: str) -> None:
    """Import the middleware ``name``, as the server does later, in the same process."""
    module, dot, member = name.rpartition(".")
    if not dot:
        raise ConfigError(f"--middleware {name}: must be MODULE.NAME, a class or an async function")
    try:
        middleware = getattr(import_module(module), member)
    except Exception as error:  # whatever the module raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"--middleware {name}: {reason}") from None
    if not (isclass(middleware) or iscoroutinefunction(middleware)):
        raise ConfigError(f"--middleware {name} is neither a class nor an async function")


def _check_file(path: str, option: str) -> None:
    """Check that a file can be read."""
    try:
        with Path(path).expanduser().open("rb"):
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

"""uvicorn, bound first so that a taken port is one line, and shut down gracefully."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from .app import create_app
from .service import Service

BACKLOG = 1024


class Server(uvicorn.Server):
    """Tells the worker to finish its running requests before the connections are waited for."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """SIGTERM or Ctrl-C came: no new requests, the running ones end, then the connections."""
        self.service.worker.drain()
        await super().shutdown(sockets)


def make_server(service: Service) -> Server:
    """A server for a service; `run` serves it."""
    settings = service.settings
    config = uvicorn.Config(
        create_app(service),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout_s)),
        timeout_keep_alive=30,
        backlog=BACKLOG,
        ws="none",
    )
    return Server(config, service)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError, in one line, when that cannot be."""
    try:
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(place[0], socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place[4])
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on {host}, port {port}: {reason}") from None
    return bound


def serve(service: Service, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. say: gets the address once it is bound."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = service.settings
    bound = bind(settings.host, settings.port)
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{port}")
    # uvicorn raises the signal that ended it once more, after everything has ended well
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        make_server(service).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)

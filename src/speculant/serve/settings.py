"""How the server runs: limits and access."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

MAX_CHOICES = 16
"""Most answers of one request (`n`, times prompts of a completion)."""


@dataclass(frozen=True)
class Settings:
    """Limits and access of one server.

    api_key:            what a request must bring as `Authorization: Bearer KEY`; None: no key
    allow_public:       bind to a public address without a key all the same
    model_name:         the name of the model in the API
    max_queue:          answers that may wait for a slot; more are refused with 429
    max_body_bytes:     longest body of a request
    request_timeout_s:  longest time from a request's arrival to its last token
    body_timeout_s:     longest time for a body to arrive
    shutdown_timeout_s: how long running requests may take to finish after SIGTERM
    tasks:              values that the request field `task` may have, a label of the metrics
    log_prompts:        write prompts into the log
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    allow_public: bool = False
    max_queue: int = 64
    max_body_bytes: int = 1 << 20
    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    shutdown_timeout_s: float = 60.0
    tasks: tuple[str, ...] = ()
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}: it must be from 0 to 65535 (0: any free one)")
        for flag, value, least in (
            ("--max-queue", self.max_queue, 0),
            ("--max-body-bytes", self.max_body_bytes, 1024),
        ):
            if value < least:
                raise ValueError(f"{flag} is {value}: it must be at least {least}")
        for flag, seconds in (
            ("--request-timeout", self.request_timeout_s),
            ("--shutdown-timeout", self.shutdown_timeout_s),
        ):
            if not 0 < seconds < 1e6:
                raise ValueError(f"{flag} is {seconds:g}: give seconds, more than 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ValueError("--api-key must be printable ASCII text, and not empty")
        if not (self.loopback or self.api_key or self.allow_public):
            raise ValueError(
                f"--host {self.host} can be reached from other machines: give --api-key, "
                "or --allow-public to serve without one"
            )

    @property
    def loopback(self) -> bool:
        """True when only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

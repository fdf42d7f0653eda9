"""Options given to doctor, as its command line would read them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from vllm_aiter_mla.commands.doctor import given
from vllm_aiter_mla.commands.doctor.given import Given


def with_config(
    compilation: dict[str, Any] | None = None, additional: dict[str, Any] | None = None, **env: str
) -> Given:
    """Both configs as JSON; None where one is not given."""
    arguments = [
        argument
        for name, config in (("--compilation-config", compilation), ("--additional-config", additional))
        if config is not None
        for argument in (name, json.dumps(config))
    ]
    return replace(given.read(arguments), env=env)

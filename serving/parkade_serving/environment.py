"""Names of environment variables that more than one part of the pod reads."""

from __future__ import annotations

from typing import Final

TOKEN_FILE_ENV: Final = "PARKADE_TOKEN_FILE"  # noqa: S105 - the name of a variable
"""The file with the admin routes' bearer tokens, one a line; read at every request."""
URL_ENV: Final = "PARKADE_URL"
"""Where the command line finds a pod when ``--url`` is not given."""

"""Calls between the processes of one pod: the API process and the launcher ask, the cache owner answers."""

from __future__ import annotations

from parkade_serving.rpc_client import OwnerClient
from parkade_serving.rpc_server import Handler, OwnerServer, is_served
from parkade_serving.rpc_wire import CallFailure, OwnerCallError, OwnerUnavailableError
from parkade_serving.sockets import owner_socket_path, socket_folder

__all__ = [
    "CallFailure",
    "Handler",
    "OwnerCallError",
    "OwnerClient",
    "OwnerServer",
    "OwnerUnavailableError",
    "is_served",
    "owner_socket_path",
    "socket_folder",
]

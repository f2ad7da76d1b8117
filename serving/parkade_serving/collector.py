"""Puts the owner's metrics into vLLM's own ``/metrics``.

Why it exists: vLLM publishes a connector's statistics only after an engine step, so they are stale while the engine
sleeps. This collector asks the owner when somebody scrapes.

What must stay true: a scrape is never late or broken because of the owner. Without a good answer in time there is
``parkade_up 0`` and nothing else: no old numbers. It works with one API server process; prometheus_client's
multiprocess mode ignores collectors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parkade_serving.rpc import OwnerCallError, OwnerClient, OwnerUnavailableError

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 0.5
_MULTIPROCESS_ENV: Final = "PROMETHEUS_MULTIPROC_DIR"


class OwnerCollector(Collector):
    """A collector whose families are the owner's at the moment of the scrape."""

    def __init__(self, client: OwnerClient, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask an owner that is not up yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        families = self._families()
        yield GaugeMetricFamily("parkade_up", "1 while the cache owner answers.", value=float(families is not None))
        yield from families or ()

    def _families(self) -> list[Metric] | None:
        try:
            return [rebuild(family) for family in _listed(self._client.call("metrics", timeout_s=self._timeout_s))]
        except (OwnerUnavailableError, OwnerCallError) as error:
            logger.debug("no cache metrics in this scrape: %s", error)
        except (TypeError, ValueError, KeyError) as error:
            logger.warning("the cache owner's metrics cannot be understood: %s", error)
        return None


def rebuild(family: Mapping[str, Any]) -> Metric:
    """One family of `parkade_cache.metrics.CacheMetrics.export`, as prometheus_client's own type."""
    metric = Metric(family["name"], family["help"], family["type"])
    for name, labels, value in family["samples"]:
        metric.add_sample(str(name), {str(key): str(text) for key, text in labels.items()}, float(value))
    return metric


class Registration:
    """Keeps at most one collector in a registry, also when the app is built again in one process."""

    def __init__(self) -> None:
        self._current: OwnerCollector | None = None

    def replace(self, collector: OwnerCollector, registry: CollectorRegistry = REGISTRY) -> bool:
        """Register; False in multiprocess mode, where it would be ignored."""
        if os.environ.get(_MULTIPROCESS_ENV):
            logger.warning("%s is set: /metrics carries no parkade_ metrics; use one API server", _MULTIPROCESS_ENV)
            return False
        if self._current is not None:
            registry.unregister(self._current)
        registry.register(collector)
        self._current = collector
        return True


def _listed(families: object) -> list[Mapping[str, Any]]:
    if not isinstance(families, list) or not all(isinstance(family, Mapping) for family in families):
        raise TypeError("expected a list of families")
    return families

"""What a running server tells its log: rates now and then, requests if asked to."""

import asyncio
import logging
from typing import override

from jaxllm.engine.client import EngineClient, ProcessClient
from jaxllm.engine.protocol import EngineRequest, EngineStats
from jaxllm.engine.request_streams import RequestStream

logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0
_SHOWN_TOKENS = 32


async def log_stats(client: EngineClient, interval: float = STATS_SECONDS) -> None:
    """Log what the engine did in each interval in which it did something; never returns.

    Args:
        client: asked for its statistics.
        interval: seconds between two lines.
    """
    last = client.latest_stats
    was_busy = False
    while True:
        await asyncio.sleep(interval)
        stats = client.latest_stats
        is_busy = stats.num_steps > last.num_steps or stats.num_running + stats.num_waiting > 0
        # One line more after the last busy one shows that all is done.
        if is_busy or was_busy:
            logger.info("%s", stats_line(last, stats, interval))
        last, was_busy = stats, is_busy


def stats_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Rates and levels in one line.

    Args:
        before, now: snapshots.
        seconds: between them.
    """
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    parts = [
        f"prompt {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
        f"generation {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s",
        f"running {now.num_running}",
        f"waiting {now.num_waiting}",
        f"KV cache {now.kv_cache_usage:.1%}",
    ]
    if queries:
        parts.append(f"prefix cache hits {hits / queries:.1%}")
    if now.num_preemptions > before.num_preemptions:
        parts.append(f"preempted {now.num_preemptions - before.num_preemptions}")
    return ", ".join(parts)


class RequestLoggingClient(ProcessClient):
    """Logs every request that reaches the engine."""

    @override
    async def submit(self, request: EngineRequest) -> RequestStream:
        """As ProcessClient's, after a line in the log."""
        tokens = request.prompt_tokens
        shown = ", ".join(map(str, tokens[:_SHOWN_TOKENS])) + (", ..." if len(tokens) > _SHOWN_TOKENS else "")
        logger.info("request %s: %d prompt tokens [%s], %s", request.request_id, len(tokens), shown, request.sampling)
        return await super().submit(request)

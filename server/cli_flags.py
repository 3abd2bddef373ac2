"""Flags that scripts for vLLM use and jaxllm has not, or not under that name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """A flag of a missing feature.

    Attributes:
        why: what is missing, and what works instead.
        harmless: values that ask for nothing; with one of them the flag is let through.
    """

    why: str
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ignored:
    """A flag that has nothing left to do.

    Attributes:
        why: what is so without it.
        num_values: how many words follow it.
    """

    why: str
    num_values: int = 0


RENAMED = {
    "max-request-len": "max-model-len",
    "disable-log-requests": "no-enable-log-requests",
    "enable-disable-log-requests": "no-enable-log-requests",
    "num-scheduler-steps": "num-decode-steps",
    "disable-async-output-proc": "no-async-scheduling",
    "disable-access-log": "disable-uvicorn-access-log",
}
"""Old name -> today's, without the dashes in front."""

IGNORED = {
    "use-v2-block-manager": Ignored("there is one block manager"),
    "disable-frontend-multiprocessing": Ignored("the engine always has a process of its own"),
    "max-parallel-loading-workers": Ignored("weights are loaded shard by shard", 1),
    "enable-chunked-prefill": Ignored("long prompts are always computed in chunks"),
    "max-seq-len-to-capture": Ignored("every length is compiled", 1),
    "max-context-len-to-capture": Ignored("every length is compiled", 1),
    "disable-custom-all-reduce": Ignored("XLA does the communication"),
    "enable-server-load-tracking": Ignored("GET /load always counts"),
    "disable-server-load-tracking": Ignored("GET /load always counts"),
    "code-revision": Ignored("models are built in, no code is loaded from a repository", 1),
    "scheduling-policy": Ignored("requests run by their priority, then in the order in which they came", 1),
    "prefix-caching-hash-algo": Ignored("prefixes are always told apart by BLAKE2b", 1),
    "device": Ignored("JAX takes the best device there is; the environment variable JAX_PLATFORMS overrides it", 1),
}

_ONE_ENGINE = "one server runs one engine; start several servers behind a load balancer"
_NO_RAY = "the engine is one process that sees all devices of its host; --tensor-parallel-size uses them"
_NO_LORA = "adapters are not loaded; merge the adapter into the weights and serve the result"
_NO_SPECULATION = "there is no speculative decoding; leave it out, the text is the same"
_NO_STRUCTURE = "output is not constrained to a grammar or schema; ask for the format in the prompt"
_NO_TOOLS = "tool calls are not parsed out of the text; describe tools in the prompt and parse the answer"
_NO_REASONING = "reasoning is not split off; it comes as a part of the text"
_NO_QUANTIZATION = "quantised checkpoints are not loaded, but for GGUF files, which need no flag"
_NO_MEDIA = "models take and make text only"
_NO_COMPILATION = "XLA compiles every step whole; --enforce-eager does it on first use instead of before serving"
_NO_POOLING = "models generate text only; there are no embeddings, scores or classes"
_NO_OFFLOAD = (
    "weights stay on the devices; --tensor-parallel-size spreads them over several, --dtype makes them smaller"
)
_NO_KV_TIER = "KV is not stored outside the device but for preempted sequences (--swap-space GiB)"
_NO_OVERRIDE = "the model's own configuration is used; change config.json in a copy of its folder"

_FALSE = ("false", "0")

REFUSED = {
    "no-enable-chunked-prefill": Refused(
        "long prompts are always computed in chunks; --max-num-batched-tokens sets how long these may be"
    ),
    "pipeline-parallel-size": Refused(
        "layers are not spread over devices; --tensor-parallel-size shares each layer instead", ("1",)
    ),
    "data-parallel-size": Refused(_ONE_ENGINE, ("1",)),
    "data-parallel-size-local": Refused(_ONE_ENGINE, ("1",)),
    "data-parallel-rank": Refused(_ONE_ENGINE),
    "data-parallel-start-rank": Refused(_ONE_ENGINE),
    "data-parallel-address": Refused(_ONE_ENGINE),
    "data-parallel-rpc-port": Refused(_ONE_ENGINE),
    "data-parallel-backend": Refused(_ONE_ENGINE),
    "data-parallel-hybrid-lb": Refused(_ONE_ENGINE),
    "data-parallel-external-lb": Refused(_ONE_ENGINE),
    "api-server-count": Refused("there is one HTTP process; start several servers for more", ("1",)),
    "headless": Refused(_ONE_ENGINE),
    "nnodes": Refused("an engine does not span hosts", ("1",)),
    "node-rank": Refused("an engine does not span hosts", ("0",)),
    "decode-context-parallel-size": Refused("a sequence is not spread over devices", ("1",)),
    "prefill-context-parallel-size": Refused("a sequence is not spread over devices", ("1",)),
    "enable-expert-parallel": Refused("there are no mixture-of-experts models", _FALSE),
    "distributed-executor-backend": Refused(_NO_RAY, ("mp", "uni")),
    "worker-use-ray": Refused(_NO_RAY, _FALSE),
    "ray-workers-use-nsight": Refused(_NO_RAY, _FALSE),
    **dict.fromkeys(
        (
            "enable-lora",
            "lora-modules",
            "max-loras",
            "max-lora-rank",
            "max-cpu-loras",
            "lora-dtype",
            "lora-extra-vocab-size",
            "fully-sharded-loras",
            "long-lora-scaling-factors",
            "default-mm-loras",
            "enable-prompt-adapter",
        ),
        Refused(_NO_LORA, _FALSE),
    ),
    **dict.fromkeys(
        (
            "speculative-config",
            "speculative-model",
            "num-speculative-tokens",
            "speculative-draft-tensor-parallel-size",
            "spec-model",
            "spec-tokens",
            "spec-method",
        ),
        Refused(_NO_SPECULATION, ("none",)),
    ),
    "num-lookahead-slots": Refused(_NO_SPECULATION, ("0",)),
    "quantization": Refused(_NO_QUANTIZATION, ("none", "gguf")),
    "quantization-fp8-dynamic": Refused(_NO_QUANTIZATION, _FALSE),
    "quantization-param-path": Refused("the KV cache is not quantised and needs no scales"),
    "quantization-config": Refused(_NO_QUANTIZATION),
    "kv-cache-dtype": Refused("the KV cache has the dtype of the weights; --dtype sets both", ("auto",)),
    "calculate-kv-scales": Refused("the KV cache is not quantised and needs no scales", _FALSE),
    "guided-decoding-backend": Refused(_NO_STRUCTURE),
    "structured-outputs-config": Refused(_NO_STRUCTURE),
    "logits-processors": Refused("logits are processed inside the compiled step; use the sampling parameters"),
    "enable-auto-tool-choice": Refused(_NO_TOOLS, _FALSE),
    "enable-auto-choices": Refused(_NO_TOOLS, _FALSE),
    "tool-call-parser": Refused(_NO_TOOLS),
    "tool-parser-plugin": Refused(_NO_TOOLS),
    "tool-server": Refused(_NO_TOOLS),
    "reasoning-parser": Refused(_NO_REASONING),
    "enable-reasoning": Refused(_NO_REASONING, _FALSE),
    "task": Refused(_NO_POOLING, ("auto", "generate")),
    "runner": Refused(_NO_POOLING, ("auto", "generate")),
    "convert": Refused(_NO_POOLING, ("auto", "none")),
    "pooler-config": Refused(_NO_POOLING),
    "cpu-offload-gb": Refused(_NO_OFFLOAD, ("0", "0.0")),
    "kv-offloading-size": Refused(_NO_KV_TIER),
    "kv-offloading-backend": Refused(_NO_KV_TIER),
    "kv-transfer-config": Refused(_NO_KV_TIER),
    "enable-sleep-mode": Refused("an engine keeps its memory; end the server to free it", _FALSE),
    "compilation-config": Refused(_NO_COMPILATION),
    "optimization-level": Refused(_NO_COMPILATION),
    "preemption-mode": Refused("--swap-space above 0 swaps preempted sequences out, 0 recomputes them"),
    "hf-overrides": Refused(_NO_OVERRIDE),
    "rope-scaling": Refused(_NO_OVERRIDE),
    "rope-theta": Refused(_NO_OVERRIDE),
    "hf-config-path": Refused(_NO_OVERRIDE),
    "config-format": Refused(_NO_OVERRIDE, ("auto", "hf")),
    "limit-mm-per-prompt": Refused(_NO_MEDIA),
    "mm-processor-kwargs": Refused(_NO_MEDIA),
    "allowed-local-media-path": Refused(_NO_MEDIA),
    "omni": Refused(_NO_MEDIA),
    "logprobs-mode": Refused("log-probabilities are those of the raw logits", ("raw_logprobs",)),
    "middleware": Refused("put a proxy in front of the server"),
    "otlp-traces-endpoint": Refused("there are no traces; /metrics has histograms of where time goes"),
}
"""Name without the dashes in front -> why not."""

SHORT = {
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-asc": "api-server-count",
    "-dcp": "decode-context-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-O": "optimization-level",
}
"""Short spellings of refused flags."""

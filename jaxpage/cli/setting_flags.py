"""Declares the flags of settings, without what reads settings: `--help` must not wait for pydantic.

This module is generated from `EngineConfig` and `ServerConfig`, by
`pytest tests/test_reference.py --write-reference`. Do not edit it.
"""

from __future__ import annotations

from jaxpage.cli.flag import (
    Flag,
    OneModel,
    byte_size,
    int_or_auto,
    json_object_or_auto,
    seconds_or_none,
)

ENGINE_FLAGS = (
    Flag(
        "model",
        str,
        '"demo" (packaged), a directory, a GGUF file, or a hub id; default: demo',
        action=OneModel,
    ),
    Flag(
        "tokenizer",
        str,
        "directory of the tokenizer's files, or a GGUF file; default: the model's",
    ),
    Flag(
        "revision",
        str,
        "branch, tag or commit of the hub repository",
    ),
    Flag(
        "load_format",
        str,
        "format of the weights: auto (what is there), safetensors, orbax or gguf; default: auto",
    ),
    Flag(
        "dtype",
        str,
        "auto, float32, bfloat16 or float16; default: auto (the checkpoint's; on CPU bfloat16 "
        "only if it is faster)",
    ),
    Flag(
        "quantization",
        str,
        "weights of few bits: int8 or int4, rounded at load, int8+head or int4+head with the "
        "head; gguf, as a GGUF file has them; or the name of the checkpoint's own method; "
        "default: as the checkpoint; for a GGUF file, dequantised",
    ),
    Flag(
        "kv_cache_dtype",
        str,
        "type of the KV cache: auto (as --dtype, or as a quantised checkpoint says), int8 or fp8;"
        " default: auto",
    ),
    Flag(
        "max_model_len",
        int,
        "longest sequence in tokens, prompt and output together; default: the model's",
    ),
    Flag(
        "block_size",
        int_or_auto,
        "tokens of a KV block, a power of two from 1 to 128; auto is 16 until another number was "
        "measured on the card; default: auto",
        metavar="N",
    ),
    Flag(
        "num_blocks",
        int,
        "KV blocks of the pool, with the null block; default: what fits; on CPU 512 tokens for "
        "each of --max-num-seqs, at most 4 GiB",
    ),
    Flag(
        "kv_cache_memory_bytes",
        byte_size,
        "size of the KV pool, instead of --num-blocks: 4GiB, or bytes",
        metavar="SIZE",
    ),
    Flag(
        "gpu_memory_utilization",
        float,
        "share of the GPU's memory to use, above 0, to 1; default: 0.9",
    ),
    Flag(
        "swap_space_blocks",
        int,
        "KV blocks in host memory for swapping, else in a file of prefix_cache_directory; "
        "default: as many as the KV pool has, if they fit",
    ),
    Flag(
        "max_num_seqs",
        int,
        "most sequences in a step; each sample and beam counts; default: 64 (1 for generate and "
        "chat)",
    ),
    Flag(
        "max_num_batched_tokens",
        int,
        "most query tokens in a step; default: by device",
    ),
    Flag(
        "num_scheduler_steps",
        int_or_auto,
        "tokens that a decode step draws of each sequence before the host sees them, 1 to 32: "
        "less host time per token, and tokens that arrive together; auto is 1 on CPUs and with "
        "--speculative-config, else up to 8 while no request waits or has just come; numbers "
        "above 1 do not go with --speculative-config; default: auto",
        metavar="N",
    ),
    Flag(
        "enable_mixed_steps",
        None,
        "decodes and prompt chunks in the same step, or in alternating steps; default: what the "
        "kernel set prefers",
    ),
    Flag(
        "scheduling_policy",
        str,
        "order of admission and preemption: fcfs, priority or fair; default: fcfs",
    ),
    Flag(
        "preemption_mode",
        str,
        "what preempted requests do: auto, recompute or swap; default: auto (one sequence: "
        "recompute; several: swap)",
    ),
    Flag(
        "new_requests_wait_until",
        str,
        "new requests wait until preempted ones are readmitted or completed; higher priorities do"
        " not wait; default: readmitted",
    ),
    Flag(
        "enable_prefix_caching",
        None,
        "requests share the KV blocks of equal prefixes; default: yes",
    ),
    Flag(
        "prefix_cache_directory",
        str,
        "directory of the user's own in which full KV blocks are kept as files, for later starts "
        "with the same weights and layout",
    ),
    Flag(
        "prefix_cache_disk_bytes",
        byte_size,
        "size of the files there; the least recently used go first; default: 8GiB",
        metavar="SIZE",
    ),
    Flag(
        "attention_backend",
        str,
        "auto (the first that supports the model and the device), or the name of a kernel set "
        "(docs/internals/kernels.md); default: auto",
    ),
    Flag(
        "batch_invariant",
        None,
        "on a GPU, a token has the same bits whatever else is in the batch, and in decode, "
        "verification and chunks: kernels add up in fixed orders; on a CPU it always has; "
        "default: no",
    ),
    Flag(
        "seed",
        int,
        "from which the seeds of requests without a seed are drawn; default: 0",
    ),
    Flag(
        "speculative_config",
        json_object_or_auto,
        'speculative decoding, as JSON, such as {"method": "ngram"} (docs/guides/speculation.md);'
        " default: off",
        metavar="JSON",
    ),
    Flag(
        "enable_lora",
        None,
        "requests may name a LoRA adapter (docs/guides/lora.md); default: no",
    ),
    Flag(
        "max_loras",
        int,
        "most LoRA adapters at once on the device; default: 4",
    ),
    Flag(
        "max_lora_rank",
        int,
        "largest rank of a LoRA adapter; the others are padded to it; default: 16",
    ),
    Flag(
        "enable_prompt_embeds",
        None,
        "prompts may be vectors in place of tokens, as {'prompt_embeds': array}; default: no",
    ),
    Flag(
        "enable_return_hidden_states",
        None,
        "requests may ask for the last hidden state of each token, with return_hidden_states "
        "(docs/guides/decoding.md); default: no",
    ),
    Flag(
        "enable_return_routed_experts",
        None,
        "requests may ask for the experts of each token, with return_routed_experts "
        "(docs/guides/decoding.md); default: no",
    ),
    Flag(
        "enable_return_sampling_mask",
        None,
        "requests may ask for the tokens that each token was drawn from, with "
        "return_sampling_mask (docs/guides/decoding.md); default: no",
    ),
    Flag(
        "max_aborted_requests",
        int,
        "most aborted requests that are kept, so that they can be continued "
        "(docs/guides/reinforcement-learning.md); default: 256",
    ),
    Flag(
        "limit_images",
        int,
        "most pictures of a prompt; 0 leaves the encoder of pictures out, so that the model takes"
        " text alone; default: what a prompt holds",
    ),
    Flag(
        "encoder_cache_bytes",
        byte_size,
        "host memory for encoded pictures that later requests may have, too: 512MiB, or bytes; "
        "default: 512MiB",
        metavar="SIZE",
    ),
    Flag(
        "tensor_parallel_size",
        int,
        "devices that share the model (docs/scale.md); default: 1",
        alias="-tp",
    ),
    Flag(
        "tensor_parallel_reduction",
        str,
        "how what the devices compute is added up: invariant (the same bits on 1, 2 and 4 "
        "devices), fast (whatever is fastest there), or auto (invariant on 2 or 4 CPU devices, "
        "and with batch_invariant; else fast); default: auto",
    ),
    Flag(
        "cudagraph_update_mode",
        str,
        "on GPUs, when XLA records a step's CUDA graph anew: auto (as it does by default), "
        "always_update, skip_profiled or another of the modes that this version of JAX knows; "
        "default: auto",
    ),
    Flag(
        "cudagraph_collectives",
        None,
        "on several GPUs, what they exchange is part of a step's CUDA graph; default: no",
    ),
    Flag(
        "event_log",
        str,
        "new file for all events that a replay needs, prompts included",
    ),
    Flag(
        "event_log_weights",
        None,
        "the weights of updates are kept next to the event log, each set once; without them a "
        "replay needs their checkpoints; default: no",
    ),
)

SERVER_FLAGS = (
    Flag(
        "host",
        str,
        "address to listen on; default: 127.0.0.1 (only this machine)",
    ),
    Flag(
        "port",
        int,
        "TCP port; 0: a free one; default: 8000",
    ),
    Flag(
        "uds",
        str,
        "Unix socket to listen on, instead of host and port; default: none",
        metavar="PATH",
    ),
    Flag(
        "root_path",
        str,
        "prefix of all paths for clients of a proxy, such as /llm; the proxy may strip it; "
        "default: none",
        metavar="PATH",
    ),
    Flag(
        "models_file",
        str,
        "YAML file of several models, each loaded when a request names it",
        metavar="FILE",
        alias="--models",
    ),
    Flag(
        "served_model_name",
        str,
        "names of the model in requests, the first in answers; default: MODEL, of a path its last"
        " part",
        several=True,
    ),
    Flag(
        "lora_modules",
        str,
        "LoRA adapters that requests may name as model; with --enable-lora",
        metavar="NAME=PATH",
        several=True,
    ),
    Flag(
        "lora_directory",
        str,
        "LoRA adapters below it may be loaded by POST /v1/load_lora_adapter; default: none",
        metavar="DIRECTORY",
    ),
    Flag(
        "weights_directory",
        str,
        "weights below it may replace the model's by POST /v1/update_weights; default: none",
        metavar="DIRECTORY",
    ),
    Flag(
        "api_key_file",
        str,
        "file with API keys, one per line; also $JAXPAGE_API_KEY, separated by commas",
        metavar="FILE",
    ),
    Flag(
        "allowed_origins",
        str,
        "exact origins of other sites whose pages may use the server; default: none",
        metavar="ORIGIN",
        several=True,
    ),
    Flag(
        "batch_directory",
        str,
        "files and batches of /v1/files and /v1/batches are kept here; default: none",
        metavar="DIRECTORY",
    ),
    Flag(
        "batch_directory_bytes",
        byte_size,
        "most bytes of these files together; default: 1GiB",
        metavar="SIZE",
    ),
    Flag(
        "response_store_bytes",
        byte_size,
        "most bytes of the responses that previous_response_id may name; 0: none are kept; "
        "default: 64MiB",
        metavar="SIZE",
    ),
    Flag(
        "response_store_seconds",
        float,
        "seconds for which a response is kept; default: 3600",
    ),
    Flag(
        "response_store_directory",
        str,
        "these responses are also in files here, for a server that starts again; default: none",
        metavar="DIRECTORY",
    ),
    Flag(
        "max_queued_requests",
        int,
        "most requests that wait, in addition to running ones; more get 429; default: 256",
    ),
    Flag(
        "request_timeout_seconds",
        seconds_or_none,
        "most seconds from arrival to the last token, or none; default: 600",
        metavar="X",
    ),
    Flag(
        "shutdown_timeout_seconds",
        float,
        "seconds for running requests to finish after SIGTERM; 0: they end at once; default: 30",
    ),
    Flag(
        "max_body_bytes",
        byte_size,
        "largest request body; default: 4MiB",
        metavar="SIZE",
    ),
    Flag(
        "body_timeout_seconds",
        float,
        "seconds for a request's body to arrive; default: 30",
    ),
    Flag(
        "slow_reader_seconds",
        float,
        "seconds that a client may leave a stream unread; default: 30",
    ),
    Flag(
        "sse_keep_alive_seconds",
        float,
        "longest silence of a stream in seconds: then a comment is sent; 0: any; default: 5",
    ),
    Flag(
        "keep_alive_seconds",
        int,
        "seconds that a connection may be idle between two requests; default: 75",
    ),
    Flag(
        "max_connections",
        int,
        "most open connections; default: 1024",
    ),
    Flag(
        "strict_requests",
        None,
        "an unknown field is an error, instead of named in a header; default: no",
    ),
    Flag(
        "tool_parser",
        str,
        "format of the model's tool calls: auto (derived from its chat template), hermes, "
        "llama3_json, lfm2, granite, minicpm5 or none; default: auto",
        alias="--tool-call-parser",
    ),
    Flag(
        "reasoning_parser",
        str,
        "format of the model's reasoning, which is returned apart from the answer: auto (from its"
        " chat template), think, granite or none; default: auto",
    ),
    Flag(
        "rerank_method",
        str,
        "how /v1/rerank scores: yes_no (the form of Qwen3-Reranker), embedding, or auto (by the "
        "model's files); default: auto",
    ),
    Flag(
        "ui",
        None,
        "web page at /ui/: playground and inspector; default: no",
    ),
    Flag(
        "ui_show_prompts",
        None,
        "the inspector shows the prompts and outputs of all users; default: no",
    ),
    Flag(
        "log_requests",
        None,
        "log every request with its text; default: no",
        alias="--enable-log-requests",
    ),
    Flag(
        "log_json",
        None,
        "one JSON object per line of the log; default: no",
    ),
    Flag(
        "log_level",
        str,
        "debug, info, warning or error; default: info",
    ),
    Flag(
        "otlp_traces_endpoint",
        str,
        "send a span of each request to this URL, by OpenTelemetry: "
        "http://localhost:4318/v1/traces",
        metavar="URL",
    ),
    Flag(
        "kv_events",
        str,
        "publish which prefixes are cached, with their token ids, as vLLM does: "
        "tcp://127.0.0.1:PORT",
        metavar="ENDPOINT",
    ),
    Flag(
        "kv_events_replay",
        str,
        "where subscribers ask for KV events that they missed: tcp://127.0.0.1:PORT",
        metavar="ENDPOINT",
    ),
    Flag(
        "kv_events_topic",
        str,
        "topic of the KV events; default: none",
        metavar="TOPIC",
    ),
    Flag(
        "incident_steps",
        int,
        "keep the records of the last N steps for POST /debug/incident and failed steps",
    ),
    Flag(
        "incident_directory",
        str,
        "where incidents are written; default: the working directory",
        metavar="DIRECTORY",
    ),
    Flag(
        "incident_token_ids",
        None,
        "incidents hold prompts and outputs as token ids, and only then can they be run again; "
        "default: no",
    ),
    Flag(
        "num_hosts",
        int,
        "hosts that share the model, each with a process of its own; default: 1",
    ),
    Flag(
        "host_rank",
        int,
        "rank of this host, from 0, which is the server; the others follow it; default: 0",
        metavar="R",
    ),
    Flag(
        "coordinator",
        str,
        "address of rank 0 between the hosts; PORT + 1 is used too; auto: of the job (Slurm, "
        "Kubernetes)",
        metavar="HOST:PORT",
    ),
    Flag(
        "hosts_secret_file",
        str,
        "file with the hosts' common secret; else $JAXPAGE_HOSTS_SECRET",
        metavar="FILE",
    ),
    Flag(
        "host_timeout_seconds",
        float,
        "seconds that a host may be silent or in a step; default: 60",
    ),
    Flag(
        "profile_directory",
        str,
        "for debugging: directory for JAX traces of POST /start_profile and /stop_profile",
        metavar="DIRECTORY",
    ),
)

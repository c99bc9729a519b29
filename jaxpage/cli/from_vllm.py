"""Answers flags of `vllm serve` that jaxpage has under another name, or does not have.

An unknown flag of this table is refused with its answer. The page "Coming from vLLM" of the
documentation is made from the table.
"""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """The answer of jaxpage to a flag of vLLM.

    Attributes:
        kind: One of "renamed", "always on", "not needed" and "not there".
        text: A sentence without its full stop.
    """

    kind: str
    text: str


_RENAMED = {
    "--num-gpu-blocks-override": "use --num-blocks N",
    "--swap-space": "use --swap-space-blocks N, which counts KV blocks",
    "--cpu-offload-gb": "weights stay on the device; --swap-space-blocks N moves KV blocks to host memory",
    "--kv-offloading-size": "use --prefix-cache-directory DIRECTORY and --prefix-cache-disk-bytes SIZE",
    "--guided-decoding-backend": "structured outputs always use llguidance",
    "--structured-outputs-config": "structured outputs always use llguidance",
    "--tool-call-parser-plugin": "forms of tool calls are derived from the chat template; --tool-parser NAME takes a fixed one",
    "--uvicorn-log-level": "use --log-level NAME",
    "--timeout-keep-alive": "use --request-timeout-seconds X and --slow-reader-seconds X",
    "--api-key": "use --api-key-file FILE or $JAXPAGE_API_KEY: other users can read command lines",
    "--allowed-methods": "use --allowed-origins ORIGIN ...; its pages may send GET, POST and DELETE",
    "--allowed-headers": "use --allowed-origins ORIGIN ...; its pages may send any header",
    "--num-speculative-tokens": "use --speculative-config '{\"num_speculative_tokens\": N, ...}'",
    "--speculative-model": 'use --speculative-config \'{"method": "draft_model", "model": PATH}\'',
    "--scheduler-delay-factor": "use --new-requests-wait-until NAME",
    "--collect-detailed-traces": "use --profile-directory DIRECTORY",
    "--kv-events-config": "use --kv-events ENDPOINT and --kv-events-topic TOPIC",
    "--nnodes": "use --num-hosts N",
    "--node-rank": "use --host-rank R",
    "--master-addr": "use --coordinator HOST:PORT",
    "--master-port": "use --coordinator HOST:PORT",
    "--model-loader-extra-config": "use --load-format NAME",
    "--generation-config": "generation_config.json of the model is used; flags and requests win over it",
    "--override-generation-config": "set sampling parameters in the requests",
}
_ALWAYS = {
    "--enable-chunked-prefill": "prompts are computed in chunks of --max-num-batched-tokens",
    "--no-enable-chunked-prefill": "prompts are always computed in chunks of --max-num-batched-tokens",
    "--enable-auto-tool-choice": "tool calls are read where the chat template writes them",
    "--enable-sleep-mode": "LLM has sleep and wake_up; a server has them with --models FILE",
    "--use-v2-block-manager": "there is one block manager",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--enable-request-id-headers": "every answer has the header x-request-id",
}
_NOT_NEEDED = {
    "--disable-log-requests": "requests are logged only with --log-requests",
    "--no-enable-log-requests": "requests are logged only with --log-requests",
    "--disable-log-stats": "statistics are at /metrics, not in the log",
    "--disable-uvicorn-access-log": "--log-level warning leaves request lines out",
    "--enforce-eager": "every step is an executable that is compiled at the start",
    "--compilation-config": "every step is compiled ahead of time; --max-num-seqs bounds the shapes",
    "--cuda-graph-sizes": "the shapes of steps follow from --max-num-seqs and --max-num-batched-tokens",
    "--max-seq-len-to-capture": "every shape is compiled at the start, for all lengths",
    "--trust-remote-code": "no code of a checkpoint is ever run; families are part of jaxpage",
    "--distributed-executor-backend": "one process drives all devices of a host",
    "--disable-custom-all-reduce": "XLA does the all-reduce; see --tensor-parallel-reduction",
    "--worker-use-ray": "one process drives all devices of a host",
    "--tokenizer-mode": "the fast tokenizer of the model is used",
    "--max-logprobs": "requests may ask for up to 20 log probabilities",
    "--max-parallel-loading-workers": "tensors are read one after the other",
    "--disable-frontend-multiprocessing": "server and engine are threads of one process",
    "--download-dir": "$HF_HOME says where the hub's files go",
    "--runner": "one engine generates, scores and embeds",
    "--task": "one engine generates, scores and embeds",
    "--convert": "one engine generates, scores and embeds",
    "--max-num-partial-prefills": "all prompts that fit into a step are computed together",
}
_NOT_THERE = {
    "--return-tokens-as-token-ids": "the answers hold texts; /tokenize gives the ids",
    "--logprobs-mode": "log probabilities are those before temperature and cuts",
    "--async-scheduling": "planning and the device take turns; --num-scheduler-steps N draws several tokens a step",
    "--pipeline-parallel-size": "use --tensor-parallel-size N, also over hosts (--num-hosts)",
    "--data-parallel-size": "start replicas and put a router before them (docs/guides/replicas.md)",
    "--enable-expert-parallel": "experts are divided by --tensor-parallel-size N",
    "--decode-context-parallel-size": "a context lies on the devices of --tensor-parallel-size N",
    "--limit-mm-per-prompt": "jaxpage takes text only",
    "--mm-processor-kwargs": "jaxpage takes text only",
    "--allowed-local-media-path": "jaxpage takes text only",
    "--chat-template": "the template of the model is used; put another into its chat_template.jinja",
    "--response-role": "the role is assistant",
    "--kv-transfer-config": "prefill and decode run in one engine",
    "--ssl-keyfile": "put a proxy with TLS before the server (deploy/)",
    "--ssl-certfile": "put a proxy with TLS before the server (deploy/)",
    "--root-path": "a proxy may strip a prefix of the path",
    "--middleware": "put a proxy before the server (deploy/)",
    "--hf-overrides": "edit the model's config.json",
    "--logits-processors": "requests have logit_bias, bad_words, allowed_token_ids and grammars",
    "--rope-scaling": "edit rope_scaling in the model's config.json",
    "--rope-theta": "edit rope_theta in the model's config.json",
    "--skip-tokenizer-init": "a directory without tokenizer files serves token ids",
    "--quantization-param-path": "scales are read from the checkpoint",
}

ANSWERS: dict[str, Answer] = {
    flag: Answer(kind, text)
    for kind, table in (
        ("renamed", _RENAMED),
        ("always on", _ALWAYS),
        ("not needed", _NOT_NEEDED),
        ("not there", _NOT_THERE),
    )
    for flag, text in table.items()
}

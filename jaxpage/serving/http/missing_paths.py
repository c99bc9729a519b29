"""Says why a server does not have some of the paths that others have."""

WHY_MISSING = {
    **dict.fromkeys(
        ("/sleep", "/wake_up", "/is_sleeping"),
        "A server of one model does not sleep: start one with `jaxpage serve --models FILE`, "
        "of which each model sleeps and wakes by itself",
    ),
    **dict.fromkeys(
        ("/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache"),
        "A server of one model is paused for updates of its weights, which it takes if it was "
        "started with `--weights-directory DIRECTORY`",
    ),
    **dict.fromkeys(
        (
            *("/init_communicator/", "/update_named_param/", "/close_communicator/"),
            *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        ),
        "This server takes no weights by NCCL: write them as safetensors below "
        "`--weights-directory` and POST /v1/update_weights, as jaxpage.integrations.trl does",
    ),
}

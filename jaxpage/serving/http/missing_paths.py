"""Says why a server does not have some of the paths that others have."""

WHY_MISSING = {
    **dict.fromkeys(
        ("/sleep", "/wake_up", "/is_sleeping"),
        "A server of one model does not sleep: start one with `jaxpage serve --models FILE`, "
        "of which each model sleeps and wakes by itself",
    ),
    **dict.fromkeys(
        ("/pause", "/resume", "/is_paused"),
        "A server of one model is paused for updates of its weights, which it takes if it was "
        "started with `--weights-directory DIRECTORY`",
    ),
}

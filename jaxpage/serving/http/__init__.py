"""Guards the application: connections with deadlines, and middlewares, all of them plain ASGI."""

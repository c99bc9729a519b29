"""What stands between a socket and the application: connections with deadlines, and middlewares. All of it is plain ASGI."""

# The router of deploy/compose.yaml and deploy/kubernetes.yaml: docker build -f deploy/router.Dockerfile -t jaxpage-router deploy
# The version is that of tests/test_routers.py. It has not been built here, for want of a Docker engine.
FROM python:3.12-slim
RUN pip install --no-cache-dir vllm-router==0.1.17 && useradd --uid 10001 --create-home router
USER 10001
EXPOSE 8000
ENTRYPOINT ["vllm-router", "--host", "0.0.0.0", "--port", "8000"]

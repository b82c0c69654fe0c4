"""`app`: an endpoint of replicas for Ray Serve."""

# Annotations are not strings here: Ray copies the routes, and names in strings would be unknown where they are copied
# to. For the same reason, all their work is done in forwarding.py.
from typing import Any

from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from .engine import EngineOptions
from .forwarding import Forwarding
from .replica import Replica, ReplicaOptions
from .routing import BeginningRouter

# requests that a replica gets at once; those for which its engine has no room wait inside it
ONGOING = 64
HTTP_METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]

routes = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


@serve.ingress(routes)
class Ingress:
    """Receives requests from clients and forwards them to replicas.

    Args:
        replicas: handle of the replicas' deployment.
    """

    def __init__(self, replicas: Any) -> None:
        self._forwarding = Forwarding(replicas)

    @routes.api_route("/{path:path}", methods=HTTP_METHODS)
    async def forward(self, request: Request) -> Response:
        return await self._forwarding(request)


def app(
    model: str,
    *,
    replicas: int | tuple[int, int] = 1,
    num_gpus: float = 0,
    ingresses: int = 1,
    served: ReplicaOptions | dict[str, Any] | None = None,
    deployment: dict[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """Returns an application for `serve.run`: replicas of a model with the routes of `hf-diffkv serve`.

    A request goes to a replica that has seen the same beginning before, unless that replica's queue is too long. If a
    replica dies before it has sent the first bytes of an answer, another one is asked and the client notices nothing.
    A stream that has begun ends with an error event. A replica whose engine has ended is replaced.

    Args:
        model: field of `EngineOptions` of that name.
        replicas: number of replicas, or the fewest and the most, between which Ray Serve scales with their queues.
        num_gpus: number of GPUs per replica.
        ingresses: number of processes that read requests and choose replicas.
        served: fields of `ReplicaOptions`, such as "name", the name that clients use for the model.
        deployment: further options of the replicas' deployment, such as `max_ongoing_requests` (64),
            `max_queued_requests` (no limit; beyond it clients get 429) and `health_check_period_s`.
        **options: other fields of `EngineOptions`. With `prefixes`, replicas keep the prefixes of requests.

    Raises:
        ValueError: fewer than one replica, or a range whose first number is larger than its second.
    """
    fewest, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    if not 1 <= fewest <= most:
        raise ValueError(f"replicas={replicas!r} must be 1 or more, or the fewest and the most.")
    chosen = {"max_ongoing_requests": ONGOING, "ray_actor_options": {"num_gpus": num_gpus}, **(deployment or {})}
    if fewest == most:
        chosen.setdefault("num_replicas", most)
    else:
        ongoing = chosen["max_ongoing_requests"]
        chosen.setdefault(
            "autoscaling_config",
            AutoscalingConfig(min_replicas=fewest, max_replicas=most, target_ongoing_requests=max(1, ongoing // 2)),
        )
    router = RequestRouterConfig(request_router_class=BeginningRouter)
    serving = served if isinstance(served, ReplicaOptions) else ReplicaOptions(**(served or {}))
    held = serve.deployment(Replica, request_router_config=router, **chosen)
    bound = held.bind(EngineOptions(model, **options), serving)
    return serve.deployment(Ingress, num_replicas=ingresses, max_ongoing_requests=10_000).bind(bound)

"""The home of processes in a container that has nothing of ours inside: a shell script, sent to it when needed."""

from omnara.machines.docker.home import DockerHome

__all__ = ["DockerHome"]

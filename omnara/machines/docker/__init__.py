"""The home of processes in a container that has nothing of ours inside: a shell script, sent to it when it is needed."""

from omnara.machines.docker.home import DockerHome

__all__ = ["DockerHome"]

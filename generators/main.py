"""`start-generator`: an agent and the SGLang server beside it."""

import asyncio

from wire.command_line import load_arguments, refuse_settings, role_parser, run_role
from wire.errors import ConfigError
from wire.logs import start_logging


def main() -> int:
    """Parse, check, run."""
    parser = role_parser(
        "start-generator",
        "Generate trajectories for the broker of a run with an SGLang server of its own.",
        [
            "start-generator --config run.toml --name generator-0",
            "start-generator --config run.toml --name generator-1 generators.device=cpu",
        ],
    )
    parser.add_argument("--name", default="generator-0", help="unique within the run")
    arguments = parser.parse_args()
    from generators.config import generator_settings
    from generators.sglang_process import server_flags

    try:
        settings = generator_settings(load_arguments(arguments))
        if arguments.dry_run:
            flags = server_flags(settings, port=0, api_key="(random)", seed_of=arguments.name)
            print("\n".join(f"sglang {name} = {value}" for name, value in flags.items()))  # noqa: T201
            return 0
    except ConfigError as error:
        return refuse_settings(error)
    start_logging(arguments.name)
    from generators.service import serve

    def body() -> int:
        asyncio.run(serve(settings, arguments.name))
        return 0

    return run_role(body)


if __name__ == "__main__":
    raise SystemExit(main())

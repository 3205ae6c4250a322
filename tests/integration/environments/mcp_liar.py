"""An MCP server by hand, whose tool has no schema: python mcp_liar.py SCHEMA, as JSON."""

import json
import sys

for line in sys.stdin:
    request = json.loads(line)
    result: dict[str, object] | None = None
    if request.get("method") == "initialize":
        result = {"protocolVersion": request["params"]["protocolVersion"]}
        result |= {"capabilities": {"tools": {}}, "serverInfo": {"name": "liar", "version": "1"}}
    elif request.get("method") == "tools/list":
        result = {"tools": [{"name": "x", "inputSchema": json.loads(sys.argv[1])}]}
    if "id" in request:
        answer: dict[str, object] = {"jsonrpc": "2.0", "id": request["id"]}
        answer |= (
            {"error": {"code": -32601, "message": "no"}} if result is None else {"result": result}
        )
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()

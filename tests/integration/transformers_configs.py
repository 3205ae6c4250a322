"""Print what transformers reads in the config.json of folders below FOLDER, and write them anew.

Each is written to FOLDER-written/NAME, as it is saved, and to FOLDER-whole/NAME with all keys.
"""

import json
import sys
from pathlib import Path


def main(folder: str) -> None:
    from transformers import AutoConfig, GenerationConfig

    found: dict[str, object] = {}
    for path in sorted(Path(folder).iterdir()):
        config = AutoConfig.from_pretrained(path)
        whole_config, config = config, config.get_text_config()
        rope = config.rope_parameters
        found[path.name] = {
            "hidden": config.hidden_size,
            "inner": getattr(config, "intermediate_size", 0),
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "groups": config.num_key_value_heads,
            "vocabulary": config.vocab_size,
            "positions": config.max_position_embeddings,
            "eps": config.rms_norm_eps,
            "tied": getattr(config, "tie_word_embeddings", whole_config.tie_word_embeddings),
            "theta": rope["rope_theta"],
            "rope": rope["rope_type"],
            "factor": rope.get("factor", 1.0),
            "turning": rope.get("partial_rotary_factor", 1.0),
            "chosen": getattr(config, "num_experts_per_tok", 0),
        }
        whole_config.save_pretrained(Path(f"{folder}-written") / path.name)
        whole = Path(f"{folder}-whole") / path.name
        whole.mkdir(parents=True)
        whole_config.to_json_file(whole / "config.json", use_diff=False)
    found["of generation"] = sorted(GenerationConfig().to_dict())
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

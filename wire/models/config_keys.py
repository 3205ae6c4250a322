"""Keys of config.json: read for every family, without effect on what is computed, or fixed."""

from collections.abc import Mapping

_READ = """
attention_bias head_dim hidden_size intermediate_size layer_types max_position_embeddings
model_type num_attention_heads num_hidden_layers num_key_value_heads quantization_config
rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
"""
# Keys that transformers 4 wrote for its own generation, or took from there; 5 leaves them unread.
_GENERATION = """
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
bad_words_ids begin_suppress_tokens cache_config cache_implementation compile_config constraints
continuous_batching_config disable_compile diversity_penalty do_sample dola_layers early_stopping
encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id
guidance_scale is_assistant length_penalty low_memory max_cache_len max_length
max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p
no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_logits output_scores penalty_alpha prefill_chunk_size
prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty
return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens
target_lookbehind temperature token_healing top_h top_k top_p typical_p use_mtp
watermarking_config
"""
_TRAINING_AND_KERNELS = """
_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
_experts_implementation _experts_implementation_internal _flash_attn_2_enabled _name_or_path
_output_attentions add_cross_attention architectures attn_implementation auto_map bos_token_id
chunk_size_feed_forward cls_token_id cross_attention_hidden_size decoder_start_token_id dtype
embd_pdrop eos_token_id experts_implementation finetuning_task gradient_checkpointing id2label
initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id mask_token_id
max_seq_length max_sequence_length model_max_length name_or_path neftune_noise_alpha num_labels
output_attentions output_hidden_states output_past output_router_logits pad_token_id prefix
pretraining_tp problem_type resid_pdrop return_dict router_aux_loss_coef sep_token_id seq_length
task_specific_params tf_legacy_loss tie_encoder_decoder tie_last_hidden_states tokenizer_class
torch_dtype torchscript transformers.js_config transformers_version unk_token_id unsloth_fixed
unsloth_version use_bfloat16 use_cache vocab_file xla_device
"""
KEYS_OF_ALL = frozenset(_READ.split())
"""Keys that are read for every family."""
IGNORED_KEYS = frozenset(_GENERATION.split()) | frozenset(_TRAINING_AND_KERNELS.split())
"""Keys that change nothing that is computed here."""
FIXED_KEYS: Mapping[str, object] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pruned_heads": {},
    "use_sliding_window": False,
}
"""Keys of every family, with the only value that is computed."""

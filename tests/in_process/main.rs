//! Tests in one process: the library, the shipped files and the documentation.

mod architecture;
mod config;
mod config_schema;
mod docs;
mod explain;
mod feeds;
mod kv_events;
mod logs;
mod prompt_vectors;
mod readme;
mod replay;
mod replay_agents;
mod sim;
mod tokenize;
mod tools;
mod virtual_time;
mod vllm_hash;
mod workflows;

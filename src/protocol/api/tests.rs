use super::*;

#[test]
fn paths_map_to_apis() {
    let cases: &[(&str, Api, Option<&str>)] = &[
        ("/v1/completions", Api::Completions, None),
        ("/v1/completions/", Api::Completions, None),
        ("/v1/completions?timeout=3&x=/v1/chat/completions", Api::Completions, None),
        ("completions", Api::Completions, None),
        ("/v1/chat/completions", Api::ChatCompletions, None),
        ("/openai/v1/chat/completions//", Api::ChatCompletions, None),
        ("/models/tiny/v1/chat/completions", Api::ChatCompletions, None),
        ("/v1/chat/completions/batch", Api::ChatBatch, None),
        ("/v1/responses", Api::Responses, None),
        ("/v1/responses/compact", Api::Responses, None),
        ("/backend-api/codex/responses/compact/", Api::Responses, None),
        ("/v1/responses/input_tokens", Api::InputTokens, None),
        ("/responses/input_tokens?x", Api::InputTokens, None),
        ("/v1/chat/completions/input_tokens", Api::InputTokens, None),
        ("/v1/responses/resp_1/input_tokens", Api::Other, None),
        ("/v1/responses/resp_1", Api::ResponseById, Some("resp_1")),
        ("/v1/responses/resp_1/cancel?x", Api::ResponseById, Some("resp_1")),
        ("/responses/resp_1/input_items/", Api::ResponseById, Some("resp_1")),
        ("/v1/conversations", Api::Conversations, None),
        ("/v1/conversations/conv_1", Api::Conversations, Some("conv_1")),
        ("/v1/conversations/conv_1/items", Api::Conversations, Some("conv_1")),
        ("/v1/conversations/conv_1/items/msg_1", Api::Conversations, Some("conv_1")),
        ("/v1/messages", Api::Messages, None),
        ("/messages", Api::Messages, None),
        ("/anthropic/v1/messages?beta=true", Api::Messages, None),
        ("/v1/threads/t_1/messages", Api::Other, None),
        ("/v1/messages/batches", Api::Other, None),
        ("/v1/messages/batches/msgbatch_1/results", Api::Other, None),
        ("/v1/chat/completions/chatcmpl-1", Api::Other, None),
        ("/v1/chat/completions/chatcmpl-1/messages", Api::Other, None),
        ("/v1/completions/render", Api::Other, None),
        ("/v1/batches/batch_1/cancel", Api::Other, None),
        ("/v1/files", Api::Other, None),
        ("/v1/files/file-1/content", Api::Other, None),
        ("/v1/fine_tuning/jobs/ftjob-1/cancel", Api::Other, None),
        ("/v1/images/edits", Api::Other, None),
        ("/v1/images/variations", Api::Other, None),
        ("/v1/audio/speech", Api::Other, None),
        ("/inference/v1/generate", Api::Generate, None),
        ("/p/inference/v1/generate/?x", Api::Generate, None),
        ("/generate", Api::SglangGenerate, None),
        ("/p/generate/?x", Api::SglangGenerate, None),
        ("/v2/models/tiny/generate", Api::Other, None),
        ("/models/tiny/generate", Api::Other, None),
        ("/v2/models/tiny/versions/1/generate", Api::SglangGenerate, None),
        ("/v1/messages/count_tokens", Api::CountTokens, None),
        ("/v1/embeddings", Api::Embeddings, None),
        ("/v2/embed", Api::Embeddings, None),
        ("/rerank", Api::Rerank, None),
        ("/v2/rerank", Api::Rerank, None),
        ("/score", Api::Score, None),
        ("/tokenize", Api::Tokenize, None),
        ("/detokenize", Api::Detokenize, None),
        ("/v1/audio/transcriptions", Api::Transcription, None),
        ("/v1/audio/translations", Api::Translation, None),
        ("/pooling", Api::Pooling, None),
        ("/classify", Api::Classify, None),
        ("/v1/models", Api::Models, None),
        ("/v1/models/org/tiny", Api::Models, None),
        ("/vllm.grpc.engine.VllmEngine/Generate", Api::GrpcGenerate, None),
        ("/vllm.grpc.engine.VllmEngine/Embed", Api::GrpcEmbed, None),
        ("/vllm.grpc.engine.VllmEngine/Abort", Api::GrpcUnsupported, None),
        ("unsupportedMethod", Api::Other, None),
        ("/v1/chat/completions/render", Api::Other, None),
        ("/v1/images/generations", Api::Other, None),
        ("/v1/chatcompletions", Api::Other, None),
        ("/", Api::Other, None),
        ("", Api::Other, None),
        ("//?", Api::Other, None),
    ];
    for (path, api, id) in cases {
        assert_eq!(Api::from_path(path), (*api, id.map(Cow::Borrowed)), "{path}");
    }
}

#[test]
fn encoded_paths_map_to_the_api_that_servers_decode() {
    let cases: &[(&str, Api, Option<&str>)] = &[
        ("/v1/%63hat/completions", Api::ChatCompletions, None),
        ("/v1/chat%2Fcompletions", Api::ChatCompletions, None),
        ("/v1%2fchat%2fcompletion%73?x=%2F", Api::ChatCompletions, None),
        ("/%76%31/%6d%65%73%73%61%67%65%73", Api::Messages, None),
        ("/v1/responses/%63ompact", Api::Responses, None),
        ("/v1/responses/resp%5F1", Api::ResponseById, Some("resp_1")),
        ("/gener%61te", Api::SglangGenerate, None),
        ("/v1/%6dodels/org%2Ftiny", Api::Models, None),
        // Paths are decoded only once.
        ("/v1/%2563hat/completion%2573", Api::Other, None),
        ("/v1/chat/completions%", Api::Other, None),
        ("/v1/chat/completion%7", Api::Other, None),
        ("/v1/chat/completion%zz", Api::Other, None),
        ("/v1/chat/completions%3Fx", Api::Other, None),
        ("/v1/chat/completions%00", Api::Other, None),
        ("/v1/chat/completions%ff", Api::Other, None),
    ];
    for (path, api, id) in cases {
        assert_eq!(Api::from_path(path), (*api, id.map(Cow::Borrowed)), "{path}");
    }
    assert_eq!(decoded_path("/a%20%c3%a9%fe%4?b%20"), "/a é\u{fffd}%4");
}

#[test]
fn names_are_unique() {
    let mut names: Vec<_> = Api::ALL.iter().map(|a| a.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Api::ALL.len());
}

#[test]
fn body_members_determine_the_api() {
    for (body, api) in [
        (r#"{"model": "m", "messages": []}"#, Api::ChatCompletions),
        (r#"{"system": "s", "messages": [], "max_tokens": 5}"#, Api::Messages),
        (r#"{"messages": [], "system": null}"#, Api::ChatCompletions),
        (r#"{"prompt": "messages"}"#, Api::Completions),
        (r#"{"text": "a", "sampling_params": {}}"#, Api::SglangGenerate),
        (r#"{"text": "a"}"#, Api::Other),
        (r#"{"prompt": [1, 2]}"#, Api::Completions),
        (r#"{"input": "text", "model": "m"}"#, Api::Responses),
        (r#"{"input": [{"role": "user", "content": "a"}]}"#, Api::Responses),
        (r#"{"input": [ "a", "b"]}"#, Api::Embeddings),
        (r#"{"input": [[1, 2], [3]]}"#, Api::Embeddings),
        (r#"{"input": "text", "encoding_format": "base64"}"#, Api::Embeddings),
        (r#"{"input": [{"text": "a"}, {"image": "b"}]}"#, Api::Embeddings),
        (r#"{"input": [{"type": "message", "content": "a"}]}"#, Api::Responses),
        (r#"{"input": [], "previous_response_id": "resp_1"}"#, Api::Responses),
        (r#"{"query": "q", "items": ["a"]}"#, Api::Score),
        ("\u{feff}{\"prompt\": \"a\"}", Api::Completions),
        (r#"{"query": "q", "documents": ["a"]}"#, Api::Rerank),
        (r#"{"text_1": "a", "text_2": "b"}"#, Api::Score),
        (r#"{"token_ids": [1], "sampling_params": {}}"#, Api::Generate),
        (r#"{"nested": {"messages": []}}"#, Api::Other),
        (r#"{"m\u0065ssages": []}"#, Api::ChatCompletions),
        (r#"{"messages": null}"#, Api::Other),
        ("[1]", Api::Other),
        ("", Api::Other),
        ("\u{1f}\u{8b}", Api::Other),
    ] {
        assert_eq!(Api::from_body(body.as_bytes()), api, "{body}");
        if api != Api::Other {
            assert_eq!(Api::from_path(api.usual_path()).0, api);
        }
    }
}

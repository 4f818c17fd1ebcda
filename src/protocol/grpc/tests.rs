use super::*;
use crate::{Piece, parse};
use attache_types::limits::Limits;

fn frame(message: &impl Message) -> Vec<u8> {
    let body = message.encode_to_vec();
    let mut out = vec![0];
    out.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
    out.extend_from_slice(&body);
    out
}

fn tokenized(text: &str, ids: &[u32]) -> Option<TokenizedInput> {
    Some(TokenizedInput { original_text: text.to_owned(), input_ids: ids.to_vec() })
}

fn read_ok(api: Api, message: &impl Message) -> Request<'static> {
    let request = read(api, &frame(message)).unwrap();
    assert_eq!(request.model, None);
    request
}

#[test]
fn generate_by_text_or_by_token_ids() {
    let params = Some(SamplingParams { max_tokens: Some(9), n: 2 });
    let text =
        GenerateRequest { text: "test1".to_owned(), stream: true, sampling_params: params, ..Default::default() };
    let request = read_ok(Api::GrpcGenerate, &text);
    assert_eq!(request.prompt.pieces, [Piece::Text("test1".into())]);
    assert_eq!((request.stream, request.max_tokens, request.choices), (true, Some(9), 2));
    assert_eq!((request.prompt.text_bytes, request.prompt.count), (5, 1));

    let ids = GenerateRequest { tokenized: tokenized("abc", &[1, 2, 3]), ..Default::default() };
    let request = read_ok(Api::GrpcGenerate, &ids);
    assert_eq!(request.prompt.pieces, [Piece::Tokens(vec![1, 2, 3])]);
    assert_eq!((request.prompt.token_ids, request.choices, request.stream), (3, 1, false));
}

#[test]
fn embed_by_the_original_text() {
    let request = read_ok(Api::GrpcEmbed, &EmbedRequest { tokenized: tokenized("test1", &[]) });
    assert_eq!(request.prompt.pieces, [Piece::Text("test1".into())]);
}

#[test]
fn bodies_without_a_valid_frame_are_rejected() {
    let sound = frame(&GenerateRequest { text: "x".to_owned(), ..Default::default() });
    let mut compressed = sound.clone();
    compressed[0] = 1;
    let mut long = sound.clone();
    long.push(0);
    let broken = [&[0, 0, 0, 0, 2][..], &[0x1A, 0x7F]].concat();
    let not_text = [&[0, 0, 0, 0, 3][..], &[0x1A, 1, 0xFF]].concat();
    for body in [
        &b"plain text not grpc payload style"[..],
        b"",
        b"\0\0",
        &compressed,
        &long,
        &sound[..sound.len() - 1],
        &broken,
        &not_text,
    ] {
        let error = parse(Api::GrpcGenerate, None, body, &Limits::default()).unwrap_err();
        assert_eq!(error.reason, Reason::InvalidGrpc, "{body:?}");
        assert!(!error.message.contains("plain text"), "{error}");
    }
    let error = parse(Api::GrpcUnsupported, None, &sound, &Limits::default()).unwrap_err();
    assert_eq!(error.reason, Reason::UnsupportedGrpcMethod);
}

#[test]
fn counts_are_read_for_any_chunks() {
    let chunk = GenerateStreamChunk { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 0 };
    let complete = GenerateComplete { prompt_tokens: 7, completion_tokens: 10, cached_tokens: 4 };
    let mut answer = frame(&GenerateResponse { chunk: Some(chunk), complete: None });
    answer.extend_from_slice(&frame(&GenerateResponse::default()));
    answer.extend_from_slice(&frame(&GenerateResponse { chunk: None, complete: Some(complete) }));
    let expected = Usage { prompt_tokens: Some(7), completion_tokens: Some(10), cached_tokens: Some(4) };
    for at in 0..=answer.len() {
        let (a, b) = answer.split_at(at);
        let mut scanner = GrpcUsageScanner::new(Api::GrpcGenerate);
        scanner.push(a);
        scanner.push(b);
        assert_eq!(scanner.usage(), Some(expected), "split at {at}");
    }
    let mut scanner = GrpcUsageScanner::new(Api::GrpcEmbed);
    scanner.push(&frame(&EmbedResponse { prompt_tokens: 5 }));
    assert_eq!(scanner.usage(), Some(Usage { prompt_tokens: Some(5), ..Usage::default() }));
    let mut scanner = GrpcUsageScanner::new(Api::GrpcGenerate);
    scanner.push(b"no healthy upstream");
    assert_eq!(scanner.usage(), None);
}

#[test]
fn messages_that_are_too_long_or_compressed_are_skipped() {
    let long = vec![7; DEFAULT_MAX_ANSWER_MESSAGE_BYTES + 1];
    let mut stream = vec![0];
    stream.extend_from_slice(&u32::try_from(long.len()).unwrap().to_be_bytes());
    stream.extend_from_slice(&long);
    stream.extend_from_slice(&[1, 0, 0, 0, 2, 9, 9]);
    stream.extend_from_slice(&[0, 0, 0, 0, 0]);
    stream.extend_from_slice(&[0, 0, 0, 0, 3, 1, 2, 3]);
    for size in [1, 3, 4096, stream.len()] {
        let mut splitter = FrameSplitter::default();
        let mut messages = Vec::new();
        for chunk in stream.chunks(size) {
            splitter.push(chunk, |m| messages.push(m.to_vec()));
        }
        assert_eq!(messages, [vec![], vec![1, 2, 3]], "chunks of {size}");
    }
}

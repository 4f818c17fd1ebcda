use super::*;
use memchr::memmem;
use proptest::prelude::*;

const TYPE: &str = "multipart/form-data; boundary=\"X-1\"";

/// A form of parts: their headers and values.
fn form(parts: &[(&str, &str)]) -> Vec<u8> {
    let mut body = Vec::new();
    for (headers, value) in parts {
        body.extend_from_slice(format!("--X-1\r\n{headers}\r\n\r\n{value}\r\n").as_bytes());
    }
    body.extend_from_slice(b"--X-1--\r\n");
    body
}

fn named(name: &str) -> String {
    format!("Content-Disposition: form-data; name=\"{name}\"")
}

fn of<'a>(content_type: &str, body: &'a [u8]) -> Request<'a> {
    read(Some(content_type), body, &Limits::default())
}

fn model(content_type: &str, body: &[u8]) -> Option<String> {
    of(content_type, body).model.map(|m| m.name.into_owned())
}

/// What the scanner finds in a form that arrives in chunks of these sizes, in turn.
fn chunked(body: &[u8], sizes: &[usize]) -> (FormModel, Option<std::ops::Range<usize>>) {
    let mut scanner = FormScanner::new(Some(TYPE), &Limits::default());
    let (mut rest, mut sizes) = (body, sizes.iter().cycle());
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at(rest.len().min(*sizes.next().unwrap_or(&1)));
        scanner.push(chunk);
        rest = after;
    }
    (scanner.model(), scanner.model_span())
}

#[test]
fn model_is_found_wherever_it_is() {
    let file =
        ("content-disposition: form-data; name=\"file\"; filename=\"model\"", "RIFF\r\n--X-\r\n\0\r\n--X-12\r\n");
    let model_part = (&*named("model"), "whisper");
    let language = (&*named("language"), "en");
    for parts in [
        vec![model_part, file],
        vec![file, model_part, language],
        vec![language, file, model_part, file],
        vec![("Content-Disposition: form-data; filename=a.wav; name=file", "x"), model_part],
        vec![("Content-Disposition: form-data; name=file; filename*=UTF-8''a%20b", "x"), model_part],
        vec![("Content-Disposition: form-data; name=\"file\"; filename=\"a; name=model\"", "x"), model_part],
        vec![("Content-Disposition: form-data; name=\"file\"; filename=\"a\\\"b\"", "x"), model_part],
        vec![("content-DISPOSITION:form-data;name=model", "whisper"), file],
        vec![("Content-Type: text/plain\r\nContent-Disposition: form-data; name=\"model\"", "whisper")],
        vec![("", "no headers"), ("Content-Type: a/b", "no name"), model_part],
    ] {
        let body = form(&parts);
        assert_eq!(model(TYPE, &body).as_deref(), Some("whisper"), "{parts:?}");
        for content_type in ["Multipart/Form-Data;charset=x;Boundary=X-1", "multipart/form-data; boundary=X-1 ; a=b"] {
            assert_eq!(model(content_type, &body).as_deref(), Some("whisper"));
        }
        let around = [b"ignored\r\n", body.as_slice(), b"epilogue --X-1\r\n\r\n"].concat();
        assert_eq!(model(TYPE, &around).as_deref(), Some("whisper"));
        let request = of(TYPE, &body);
        let span = request.model.map(|m| m.span).unwrap_or_default();
        assert_eq!(body.get(span), Some(&b"whisper"[..]));
        assert_eq!(request.unread_model, None);
    }
    let quoted = form(&[model_part]).as_slice().to_vec();
    let other = String::from_utf8(quoted).unwrap_or_default().replace("X-1", "a;b=c d");
    assert_eq!(model("multipart/form-data; boundary=\"a;b=c d\"", other.as_bytes()).as_deref(), Some("whisper"));
}

#[test]
fn numbers_of_a_form_are_read_as_servers_do() {
    let body = form(&[(&named("stream"), "on"), (&named("max_completion_tokens"), " 40 "), (&named("n"), "3")]);
    let request = of(TYPE, &body);
    assert_eq!((request.stream, request.max_tokens, request.choices), (true, Some(40), 3));
    assert_eq!((request.model, request.unread_model), (None, None), "the whole form names none");
    let body = form(&[(&named("stream"), "2"), (&named("n"), &"9".repeat(100))]);
    assert_eq!((of(TYPE, &body).stream, of(TYPE, &body).choices), (false, 1));
}

#[test]
fn form_that_servers_may_read_differently_has_no_model_and_a_reason() {
    let long = "m".repeat(257);
    let model_part = (&*named("model"), "a");
    let cases: &[(&[(&str, &str)], &str)] = &[
        (&[(&named("model"), "")], "empty"),
        (&[(&named("model"), &long)], "too long"),
        (&[(&named("model"), "a\u{7}")], "control"),
        (&[model_part, model_part], "twice"),
        (&[model_part, (&named("file"), "x"), (&named("model"), "b")], "twice"),
        (&[model_part, ("Content-Disposition: form-data; name*=utf-8''mode%6c", "b")], "encoded name"),
        (&[model_part, ("Content-Disposition: form-data; name=\"mod\\el\"", "b")], "encoded name"),
        (&[("Content-Disposition: form-data; name=\"x\"; name=\"model\"", "b")], "two names"),
        (&[("Content-Disposition: form-data;\r\n name=\"model\"", "b")], "several lines"),
        (&[("Content-Disposition: a; name=x\r\nContent-Disposition: form-data; name=model", "b")], "two Content"),
        (&[("Content-Disposition: attachment; name=\"model\"", "b")], "no form-data"),
        (&[("Content-Transfer-Encoding: base64\r\nContent-Disposition: form-data; name=model", "YQ==")], "encoded"),
        (&[("Content-Disposition: form-data; name=\"model\"\n\nb\r\nx: y", "b")], "carriage return"),
        (&[(&format!("x: {}", "y".repeat(9_000)), "b")], "8 KiB"),
    ];
    for (parts, why) in cases {
        let body = form(parts);
        let request = of(TYPE, &body);
        assert_eq!(request.model, None, "{parts:?}");
        assert!(
            request.unread_model.is_some_and(|reason| reason.contains(why)),
            "{parts:?}: {:?}",
            request.unread_model
        );
    }
    let body = form(&[model_part]);
    for content_type in ["multipart/form-data", "multipart/form-data; boundary=a; boundary=X-1", "text/plain", ""] {
        assert!(of(content_type, &body).unread_model.is_some_and(|why| why.contains("boundary")), "{content_type}");
    }
    let padded = String::from_utf8(body).unwrap_or_default().replacen("--X-1\r\n", "--X-1 \r\n", 1);
    assert!(of(TYPE, padded.as_bytes()).unread_model.is_some_and(|why| why.contains("white space")));
    let empty = b"--X-1\r\nContent-Disposition: form-data; name=x\r\n\r\n--X-1\r\n\r\nx\r\n--X-1--";
    assert!(of(TYPE, empty).unread_model.is_some_and(|why| why.contains("begins with its boundary")));
    // A file named `model` is no model, on any server.
    let file = form(&[("Content-Disposition: form-data; name=\"model\"; filename=\"m\"", "a")]);
    assert_eq!((of(TYPE, &file).model, of(TYPE, &file).unread_model), (None, None));
}

#[test]
fn model_is_known_once_its_part_has_ended() {
    let body = form(&[(&named("language"), "en"), (&named("model"), "whisper"), (&named("x"), "y")]);
    let end = memmem::find(&body, b"whisper").map(|at| at + "whisper\r\n--X-1\r\n".len());
    for n in 0..=body.len() {
        let request = of(TYPE, body.get(..n).unwrap_or_default());
        let is_known = Some(n) >= end;
        assert_eq!(request.model.as_ref().map(|m| &*m.name), is_known.then_some("whisper"), "{n}");
        assert_eq!(request.unread_model.is_some(), !is_known, "{n}");
    }
}

#[test]
fn scanner_keeps_no_file() {
    let mut scanner = FormScanner::new(Some(TYPE), &Limits::default());
    scanner.push(b"--X-1\r\ncontent-disposition: form-data; name=file; filename=a\r\n\r\n");
    for _ in 0..200 {
        scanner.push(&[b'\r'; 100_000]);
        scanner.push(b"\r\n--X-");
    }
    assert!(scanner.memory() < 1_000, "{} bytes", scanner.memory());
    scanner.push(b"\r\n--X-1\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--X-1--");
    assert_eq!(scanner.model(), FormModel::Named);
    let mut scanner = FormScanner::new(Some(TYPE), &Limits::default());
    scanner.push(b"--X-1\r\ncontent-disposition: form-data; name=model\r\n\r\n");
    for _ in 0..1_000 {
        scanner.push(&[b'm'; 1_000]);
    }
    assert!(scanner.memory() < 10_000, "{} bytes", scanner.memory());
}

#[test]
fn default_model_becomes_the_first_part() {
    let file = ("Content-Disposition: form-data; name=file; filename=a", "a file with --X-1 inside");
    for before in ["", "preamble with --X-1 inside\r\n"] {
        let body = [before.as_bytes(), &form(&[file])].concat();
        let made = insert_form_model(Some(TYPE), &body, "whisper");
        assert_eq!(model(TYPE, &made).as_deref(), Some("whisper"));
        assert!(made.ends_with(&form(&[file])));
    }
    assert_eq!(insert_form_model(Some("text/plain"), b"x", "m"), b"x");
    assert_eq!(insert_form_model(Some(TYPE), b"x", "m"), b"x");
}

/// Text that often looks like a part of a delimiter.
fn near_delimiters() -> impl Strategy<Value = String> {
    let piece =
        prop::sample::select(vec!["\r", "\n", "-", "--", "X-1", "\r\n--X-", "\r\n--X-1", "\r\n--X-1x", "a", ":"]);
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn chunks_of_any_size_give_the_same_result(
        parts in prop::collection::vec((0usize..4, near_delimiters()), 0..5),
        end in prop::sample::select(vec!["--X-1--", "--X-1", ""]),
        sizes in prop::collection::vec(1usize..40, 1..6),
    ) {
        let heads = [named("model"), named("file"), "Content-Disposition: form-data; name=f; filename=a".to_owned(), named("n")];
        let mut body = Vec::new();
        for (head, value) in &parts {
            body.extend_from_slice(format!("--X-1\r\n{}\r\n\r\n{value}\r\n", heads[*head]).as_bytes());
        }
        body.extend_from_slice(end.as_bytes());
        let whole = chunked(&body, &[body.len().max(1)]);
        prop_assert_eq!(&chunked(&body, &sizes), &whole);
        prop_assert_eq!(&chunked(&body, &[1]), &whole);
        if let Some(span) = whole.1 {
            prop_assert!(body[span.end..].starts_with(b"\r\n--X-1"));
            prop_assert!(body[..span.start].ends_with(b"\r\n\r\n"));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(body in prop::collection::vec(any::<u8>(), 0..300), kind in ".{0,60}") {
        let _ = read(Some(TYPE), &body, &Limits::default());
        let _ = read(Some(&format!("multipart/form-data;{kind}")), &body, &Limits::default());
        let _ = head::part_head(&body);
    }
}

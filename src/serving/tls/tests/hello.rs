use super::super::hello::{Nameless, as_sent};
use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use rustls::ClientConnection;
use tokio::io::AsyncReadExt;

/// The server name that Istio sends to Attaché.
const ISTIO: &[u8] = b"outbound|9002||llm-epp.ai.svc.cluster.local";

/// The records of a ClientHello with a server name that is not a DNS name.
fn client_hello() -> Vec<u8> {
    let config = ClientConfig::builder_with_provider(plain()).with_safe_default_protocol_versions().unwrap();
    let config = config.dangerous().with_custom_certificate_verifier(Arc::<Recorder>::default()).with_no_client_auth();
    let name = "a".repeat(ISTIO.len());
    let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from(name.clone()).unwrap()).unwrap();
    let mut records = Vec::new();
    client.write_tls(&mut records).unwrap();
    let at = records.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
    records[at..at + ISTIO.len()].copy_from_slice(ISTIO);
    records
}

/// The same message in records of `bytes` each.
fn in_records(records: &[u8], bytes: usize) -> Vec<u8> {
    let parts = records[5..].chunks(bytes);
    parts.flat_map(|part| [&[22, 3, 1, 0, u8::try_from(part.len()).unwrap()], part].concat()).collect()
}

/// The bytes that rustls reads when a client sends `sent` byte by byte.
async fn read(sent: &[u8]) -> Vec<u8> {
    let (mut client, server) = tokio::io::duplex(1);
    let (mut server, mut all) = (Nameless::new(server), Vec::new());
    let send = async move { client.write_all(sent).await.unwrap() };
    let ((), read) = tokio::join!(send, server.read_to_end(&mut all));
    read.unwrap();
    all
}

/// The payloads of the records, joined.
fn message(mut records: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    while let [_, _, _, high, low, rest @ ..] = records {
        let (payload, rest) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])));
        message.extend_from_slice(payload);
        records = rest;
    }
    message
}

#[tokio::test]
async fn client_hello_in_any_records_loses_its_name_and_transcript_keeps_it() {
    let sent = client_hello();
    for bytes in [1, 2, 7, 41, 42, 43, 60, 100, 250] {
        let records = in_records(&sent, bytes);
        let read = read(&records).await;
        assert_eq!(read.len(), records.len());
        let (seen, sent) = (message(&read), message(&records));
        let differences = seen.iter().zip(&sent).filter(|(a, b)| a != b).count();
        assert_eq!(differences, 2, "records of {bytes} bytes: only the extension's type is another");
        assert_eq!(as_sent(&seen), sent);
        assert_eq!(as_sent(&as_sent(&sent)), sent);
    }
}

#[tokio::test]
async fn second_client_hello_after_a_retry_loses_its_name_too() {
    let hello = client_hello();
    let change_cipher_spec = [20, 3, 3, 0, 1, 1];
    let application_data = [23, 3, 3, 0, 3, 22, 3, 1];
    let sent = [&hello[..], &change_cipher_spec, &hello, &application_data, &hello].concat();
    let seen = read(&sent).await;
    let changed = |range: std::ops::Range<usize>| sent[range.clone()] != seen[range];
    let second = hello.len() + change_cipher_spec.len();
    assert!(changed(0..hello.len()) && changed(second..second + hello.len()));
    assert!(!changed(hello.len()..second) && !changed(second + hello.len()..sent.len()), "nothing else changes");
}

#[tokio::test]
async fn bytes_that_are_no_client_hello_pass_unchanged() {
    let hello = client_hello();
    let cases: [Vec<u8>; 7] = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        vec![21, 3, 3, 0, 2, 1, 0],
        hello[..20].to_vec(),
        hello[..hello.len() - 1].to_vec(),
        // A ServerHello followed by a ClientHello.
        [&[22, 3, 3, 0, 4, 2, 0, 0, 0][..], &hello].concat(),
        // 60,000 bytes of a message that claims to be longer than any ClientHello may be.
        [&[22, 3, 1, 0xea, 0x60, 1, 0xff, 0xff, 0xff][..], &vec![0; 59_996]].concat(),
    ];
    for case in cases {
        assert_eq!(read(&case).await, case);
    }
}

#[test]
fn transcript_of_any_bytes_is_its_own_inverse() {
    let hello = client_hello();
    let sent = message(&hello);
    for end in 0..sent.len() {
        let part = &sent[..end];
        assert_eq!(as_sent(&as_sent(part)), part, "a ClientHello that ends after {end} bytes");
    }
    let with_other = [&[254, 0, 0, 2, 7, 7, 2, 0, 0, 1, 9][..], &sent].concat();
    assert_eq!(as_sent(&with_other)[11..], as_sent(&sent), "behind the messages of a retry");
    assert_ne!(as_sent(&sent), sent);
}

proptest! {
    #[test]
    fn any_bytes_keep_their_number_and_any_transcript_its_inverse(
        bytes in vec(any::<u8>(), 0..300),
        changes in vec((any::<Index>(), any::<u8>()), 0..4),
    ) {
        let mut hello = client_hello();
        for (place, byte) in changes {
            let place = place.index(hello.len());
            hello[place] = byte;
        }
        prop_assert_eq!(as_sent(&as_sent(&bytes)), bytes.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for sent in [[&hello[..], &bytes].concat(), bytes] {
            let seen = runtime.block_on(read(&sent));
            prop_assert_eq!(seen.len(), sent.len());
            let changed: Vec<u8> = seen.iter().zip(&sent).map(|(a, b)| a ^ b).filter(|difference| *difference != 0).collect();
            prop_assert!(changed.chunks(2).all(|two| two == [0xff, 0xfe]), "{changed:?}");
        }
    }
}

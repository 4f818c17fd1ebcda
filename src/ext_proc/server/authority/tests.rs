//! Header blocks as clients encode them, whole and split between reads.

use super::*;
use proptest::prelude::*;

const ISTIO: &[u8] = b"outbound|9002||llama-epp.default.svc.cluster.local";
const MENDED: &[u8] = b"outbound~9002~~llama-epp.default.svc.cluster.local";
/// [`ISTIO`] with the Huffman coding of Python's `hpack` 4.2.0.
const ISTIO_PACKED: [u8; 37] = [
    0x3d, 0xa9, 0x8c, 0xf6, 0xd5, 0x27, 0xfc, 0x7c, 0x00, 0x17, 0xfc, 0xff, 0x94, 0x50, 0x3a, 0x46, 0xb1, 0x6b, 0xad,
    0x79, 0x0b, 0x28, 0xed, 0xa1, 0x2b, 0xa3, 0xb9, 0x17, 0x25, 0x16, 0xa1, 0x25, 0xb1, 0x7a, 0x0e, 0x41, 0xd1,
];

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let [_, a, b, c] = (payload.len() as u32).to_be_bytes();
    [&[a, b, c, kind, flags, 0, 0, 0, 1], payload].concat()
}

/// A header block: `:method: POST` and `:scheme: http` by index, `:authority` as an indexed name, and one literal
/// header.
fn block(authority: &[u8]) -> Vec<u8> {
    let mut block = vec![0x83, 0x86, 0x41];
    put_text(authority, &mut block);
    block.extend([0x40, 0x02]);
    block.extend(b"te");
    put_text(b"trailers", &mut block);
    block
}

/// The bytes of a connection with these frames after its preface.
fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frames.concat()].concat()
}

fn through(bytes: &[u8], cuts: &[usize]) -> Vec<u8> {
    let mut mender = Mender::new();
    let mut out = Vec::new();
    let mut rest = bytes;
    for cut in cuts.iter().copied().chain([usize::MAX]) {
        let (piece, after) = rest.split_at(cut.min(rest.len()));
        rest = after;
        let (plain, instead) = mender.take(piece);
        out.extend_from_slice(&piece[..plain]);
        out.extend(instead);
    }
    out.extend(mender.end());
    out
}

/// RFC 7541, C.4.1 and C.6.1, and another encoder's.
#[test]
fn huffman_strings_are_decoded() {
    let of_rfc = [0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff];
    assert_eq!(unpacked(&of_rfc).as_deref(), Some(&b"www.example.com"[..]));
    assert_eq!(unpacked(&[0xae, 0xc3, 0x77, 0x1a, 0x4b]).as_deref(), Some(&b"private"[..]));
    assert_eq!(unpacked(&ISTIO_PACKED).as_deref(), Some(ISTIO));
    assert_eq!(unpacked(&[0xff, 0xff, 0xff]), None, "rare symbols are not decoded");
    assert_eq!(unpacked(&[0x00]), None, "padding that is not ones");
}

#[test]
fn invalid_authority_is_repaired_to_same_length() {
    let whole =
        |flags: u8, before: &[u8], block: &[u8], after: &[u8]| frame(HEADERS, flags, &[before, block, after].concat());
    let mut by_name = vec![0x10];
    put_text(b":authority", &mut by_name);
    let named = |value: &[u8]| {
        let mut block = by_name.clone();
        put_text(value, &mut block);
        block
    };
    let mut squeezed = vec![0x83, 0x86, 0x41, 0x80 | ISTIO_PACKED.len() as u8];
    squeezed.extend(ISTIO_PACKED);
    let plain = [&[0x83, 0x86, 0x41][..], &[MENDED.len() as u8], MENDED].concat();
    for (sent, got) in [
        (whole(4, &[], &block(ISTIO), &[]), whole(4, &[], &block(MENDED), &[])),
        (whole(4, &[], &named(ISTIO), &[]), whole(4, &[], &named(MENDED), &[])),
        (whole(4, &[], &squeezed, &[]), whole(4, &[], &plain, &[])),
        (
            whole(0x2c, &[2, 0, 0, 0, 0, 16], &block(ISTIO), &[0, 0]),
            whole(0x2c, &[2, 0, 0, 0, 0, 16], &block(MENDED), &[0, 0]),
        ),
        (whole(4, &[], &block(b"a/b c"), &[]), whole(4, &[], &block(b"a~b~c"), &[])),
    ] {
        assert_eq!(mended_frame(&sent), Some(got), "{sent:?}");
    }
    for good in [&b"llama-epp.default.svc:9002"[..], b"[::1]:9002", b"picker", b"envoy.clusters.x_y"] {
        assert_eq!(mended_frame(&whole(4, &[], &block(good), &[])), None, "{good:?}");
    }
    for hopeless in [
        whole(4, &[], &block(b""), &[]),
        whole(4, &[], &[0x41, 0x7f], &[]),
        whole(0x0c, &[99], &[], &[]),
        whole(0, &[], &block(ISTIO), &[]),
    ] {
        assert_eq!(mended_frame(&hopeless), None, "{hopeless:?} is left to h2");
    }
}

#[test]
fn unrepaired_input_is_not_copied() {
    let bytes = connection(&[frame(4, 0, &[]), frame(HEADERS, 4, &block(b"picker")), frame(0, 1, &[7; 20_000])]);
    let (plain, instead) = Mender::new().take(&bytes);
    assert_eq!((plain, instead.len()), (bytes.len(), 0));
}

proptest! {
    #[test]
    fn split_input_gives_the_same_output(
        cuts in prop::collection::vec(0usize..70, 0..30),
        odd in prop::collection::vec(any::<bool>(), 1..4),
        size in 0usize..300,
    ) {
        let mut sent = vec![frame(4, 0, &[0; 6])];
        let mut want = sent.clone();
        for istio in odd {
            sent.push(frame(HEADERS, 4, &block(if istio { ISTIO } else { b"picker" })));
            want.push(frame(HEADERS, 4, &block(if istio { MENDED } else { b"picker" })));
            let data = frame(0, 0, &vec![HEADERS; size]);
            sent.push(data.clone());
            want.push(data);
        }
        prop_assert_eq!(through(&connection(&sent), &cuts), connection(&want));
    }

    #[test]
    fn arbitrary_bytes_pass_without_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        cuts in prop::collection::vec(0usize..100, 0..10),
    ) {
        let all = connection(&[bytes]);
        let out = through(&all, &cuts);
        prop_assert_eq!(&out[..24], &all[..24]);
        prop_assert_eq!(out, through(&all, &[]));
    }
}

//! The bytes that an engine hashes for a block of tokens: a tuple of the parent's hash, the tokens, and nothing else,
//! as two of Python's serializers write it.

/// How Python writes `(parent, tokens, None)`, where `parent` is bytes and `tokens` a tuple of ints.
///
/// ```
/// use kvpool::engines::BlockBytes;
/// let mut bytes = Vec::new();
/// assert!(BlockBytes::Cbor.write(b"p", &[1, 500], &mut bytes));
/// assert_eq!(bytes, b"\x83\x41p\x82\x01\x19\x01\xf4\xf6");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockBytes {
    /// `pickle.dumps` with protocol 5, the highest of Python 3.8 to 3.14.
    Pickle,
    /// `cbor2.dumps` with `canonical=True`: RFC 8949, every length as short as it can be.
    Cbor,
}

/// A pickle of this many bytes or more is written in several frames.
const FRAME: usize = 64 << 10;

impl BlockBytes {
    /// Replaces the content of `bytes` by what Python would write.
    ///
    /// Returns whether that is known: not if the parent has more than 255 bytes, a token is negative, or a pickle
    /// takes more than one frame of 64 KiB.
    pub fn write(self, parent: &[u8], tokens: &[i32], bytes: &mut Vec<u8>) -> bool {
        bytes.clear();
        let Ok(parent_len) = u8::try_from(parent.len()) else { return false };
        if tokens.iter().any(|&token| token < 0) {
            return false;
        }
        match self {
            Self::Pickle => pickle(parent, parent_len, tokens, bytes),
            Self::Cbor => cbor(parent, tokens, bytes),
        }
    }
}

/// Opcodes of `pickletools`, in the order in which they are written.
fn pickle(parent: &[u8], parent_len: u8, tokens: &[i32], bytes: &mut Vec<u8>) -> bool {
    const PROTO_5: [u8; 2] = [0x80, 5];
    const FRAME_OPCODE: u8 = 0x95;
    const SHORT_BINBYTES: u8 = b'C';
    const MEMOIZE: u8 = 0x94;
    const MARK: u8 = b'(';
    const BININT1: u8 = b'K';
    const BININT2: u8 = b'M';
    const BININT: u8 = b'J';
    const EMPTY_TUPLE: u8 = b')';
    const TUPLES: [u8; 3] = [0x85, 0x86, 0x87];
    const TUPLE: u8 = b't';
    const NONE: u8 = b'N';
    const STOP: u8 = b'.';

    bytes.extend(PROTO_5);
    bytes.push(FRAME_OPCODE);
    let length_at = bytes.len();
    bytes.extend([0; 8]);
    let body_at = bytes.len();
    bytes.extend([SHORT_BINBYTES, parent_len]);
    bytes.extend(parent);
    bytes.push(MEMOIZE);
    let short = tokens.len().checked_sub(1).and_then(|at| TUPLES.get(at));
    if short.is_none() && !tokens.is_empty() {
        bytes.push(MARK);
    }
    for &token in tokens {
        let [a, b, c, d] = token.to_le_bytes();
        match token {
            ..0x100 => bytes.extend([BININT1, a]),
            0x100..0x1_0000 => bytes.extend([BININT2, a, b]),
            0x1_0000.. => bytes.extend([BININT, a, b, c, d]),
        }
    }
    match short {
        Some(&opcode) => bytes.extend([opcode, MEMOIZE]),
        None if tokens.is_empty() => bytes.push(EMPTY_TUPLE),
        None => bytes.extend([TUPLE, MEMOIZE]),
    }
    bytes.extend([NONE, TUPLES[2], MEMOIZE, STOP]);
    let length = bytes.len() - body_at;
    bytes[length_at..body_at].copy_from_slice(&(length as u64).to_le_bytes());
    length < FRAME
}

fn cbor(parent: &[u8], tokens: &[i32], bytes: &mut Vec<u8>) -> bool {
    const BYTES: u8 = 2 << 5;
    const ARRAY: u8 = 4 << 5;
    const NULL: u8 = 0xf6;

    head(ARRAY, 3, bytes);
    head(BYTES, parent.len() as u64, bytes);
    bytes.extend(parent);
    head(ARRAY, tokens.len() as u64, bytes);
    for &token in tokens {
        head(0, u64::from(token.unsigned_abs()), bytes);
    }
    bytes.push(NULL);
    true
}

/// Writes a major type with its argument, as short as it can be.
fn head(major: u8, argument: u64, bytes: &mut Vec<u8>) {
    match (u8::try_from(argument), u16::try_from(argument), u32::try_from(argument)) {
        (Ok(small @ 0..24), _, _) => bytes.push(major + small),
        (Ok(byte), _, _) => bytes.extend([major + 24, byte]),
        (_, Ok(word), _) => {
            bytes.push(major + 25);
            bytes.extend(word.to_be_bytes());
        }
        (_, _, Ok(word)) => {
            bytes.push(major + 26);
            bytes.extend(word.to_be_bytes());
        }
        _ => {
            bytes.push(major + 27);
            bytes.extend(argument.to_be_bytes());
        }
    }
}

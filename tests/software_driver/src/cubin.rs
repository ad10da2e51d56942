//! Cubins: what a driver needs to know of an ELF image to find kernels in it.

use std::collections::HashMap;

use crate::codes::{INVALID_IMAGE, Outcome};

/// The bytes of a header and of an entry in the table of sections, of 64 bit.
const HEADER: usize = 64;
const SECTION: usize = 64;
/// 64 bit and little-endian, behind the magic number.
const IDENTITY: [u8; 6] = *b"\x7fELF\x02\x01";
/// `EM_CUDA`.
const MACHINE: u64 = 190;
/// `SHT_NOBITS`: a section that takes no bytes of the file.
const NO_BITS: u64 = 8;
/// The version from which on the architecture has two bytes of the flags, the second and the third.
const TWO_BYTES: u8 = 8;
/// The first byte of entries of `.nv.info` that are followed by bytes of their own, and by a number only.
const SIZED: u8 = 4;
/// `EIATTR_CBANK_PARAM_SIZE` and `EIATTR_PARAM_CBANK`, the second with its size in the last two bytes.
const PARAMS_BYTES: u8 = 0x19;
const PARAMS_BANK: u8 = 0x0a;

/// A cubin as its sections describe it.
pub struct Cubin {
    /// The architecture that it is for, like 90 for `sm_90`.
    pub architecture: i32,
    /// The names of kernels, and the bytes of their parameters.
    pub entries: HashMap<String, usize>,
}

struct Section<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

/// A number of `size` bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Outcome<u64> {
    let found = bytes.get(at..at + size).ok_or(INVALID_IMAGE)?;
    Ok(found.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
}

/// A number of eight bytes that counts some.
fn count(bytes: &[u8], at: usize, size: usize) -> Outcome<usize> {
    number(bytes, at, size)?.try_into().map_err(|_| INVALID_IMAGE)
}

/// The bytes of an image whose length nobody says: its header does.
///
/// # Safety
///
/// It is an ELF image in full, or it differs from one in its first six bytes.
pub unsafe fn image<'a>(start: *const u8) -> Outcome<&'a [u8]> {
    for (at, byte) in IDENTITY.into_iter().enumerate() {
        // SAFETY: the bytes before were those of an ELF image, which goes on.
        if unsafe { start.wrapping_add(at).read() } != byte {
            return Err(INVALID_IMAGE);
        }
    }
    // SAFETY: an ELF image begins with its header.
    let header = unsafe { std::slice::from_raw_parts(start, HEADER) };
    let (table, sections) = (count(header, 40, 8)?, count(header, 60, 2)?);
    let end = table + sections * SECTION;
    // SAFETY: the header says that the table of sections lies there.
    let known = unsafe { std::slice::from_raw_parts(start, end) };
    let mut len = end;
    for at in (table..end).step_by(SECTION) {
        if number(known, at + 4, 4)? != NO_BITS {
            len = len.max(count(known, at + 24, 8)? + count(known, at + 32, 8)?);
        }
    }
    // SAFETY: a section reaches up to there.
    Ok(unsafe { std::slice::from_raw_parts(start, len) })
}

impl Cubin {
    pub fn read(image: &[u8]) -> Outcome<Self> {
        if number(image, 18, 2)? != MACHINE {
            return Err(INVALID_IMAGE);
        }
        let flags = number(image, 48, 4)?;
        let version = image.get(8).copied().unwrap_or(0);
        let architecture = if version >= TWO_BYTES { flags >> 8 & 0xFFFF } else { flags & 0xFF };
        let architecture = architecture.try_into().map_err(|_| INVALID_IMAGE)?;
        let sections = sections(image)?;
        let mut entries = HashMap::new();
        for section in &sections {
            let Some(name) = section.name.strip_prefix(".text.") else { continue };
            let wanted = format!(".nv.info.{name}");
            let info = sections.iter().find(|section| section.name == wanted).ok_or(INVALID_IMAGE)?;
            entries.insert(name.to_owned(), params_bytes(info.bytes)?);
        }
        Ok(Self { architecture, entries })
    }
}

fn sections(image: &[u8]) -> Outcome<Vec<Section<'_>>> {
    let (table, sections) = (count(image, 40, 8)?, count(image, 60, 2)?);
    let bytes = |number: usize| {
        let at = table + number * SECTION;
        let (start, len) = (count(image, at + 24, 8)?, count(image, at + 32, 8)?);
        image.get(start..start + len).ok_or(INVALID_IMAGE)
    };
    let names = bytes(count(image, 62, 2)?)?;
    let mut found = Vec::new();
    for at in 0..sections {
        let header = table + at * SECTION;
        let name = names.get(count(image, header, 4)?..).ok_or(INVALID_IMAGE)?;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = std::str::from_utf8(name).map_err(|_| INVALID_IMAGE)?;
        let has_bytes = number(image, header + 4, 4)? != NO_BITS;
        found.push(Section { name, bytes: if has_bytes { bytes(at)? } else { &[] } });
    }
    Ok(found)
}

/// The bytes of a kernel's parameters, of what `.nv.info` says of it.
fn params_bytes(info: &[u8]) -> Outcome<usize> {
    let mut at = 0;
    while at + 4 <= info.len() {
        let (format, attribute, value) = (info[at], info[at + 1], count(info, at + 2, 2)?);
        let next = at + 4 + if format == SIZED { value } else { 0 };
        match attribute {
            PARAMS_BYTES => return Ok(value),
            PARAMS_BANK if format == SIZED => return count(info, next - 2, 2),
            _ => at = next,
        }
    }
    Ok(0)
}

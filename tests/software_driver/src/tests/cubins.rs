use std::ffi::CStr;

use super::kernels::{NAME, ReadParams, five, launch};
use super::{
    Fresh, allocate, cuDeviceGetAttribute, cuModuleGetFunction, cuModuleLoadData, cuStreamSynchronize, ok,
    peek, soft_set_capability,
};
use crate::codes::{INVALID_IMAGE, INVALID_PTX, NO_BINARY_FOR_GPU, NOT_FOUND};

/// An ELF image with a kernel for an architecture, as assemblers of CUDA 12 write them, or those of 13.
fn cubin(architecture: u8, is_new: bool, machine: u8) -> Vec<u8> {
    let name = NAME.to_string_lossy();
    let names = format!("\0.shstrtab\0.text.{name}\0.nv.info.{name}\0");
    let size = u16::try_from(size_of::<ReadParams>()).unwrap_or(0).to_le_bytes();
    // One attribute with bytes of its own, one without, and the size of the parameters.
    let info = [&[4, 0x17, 4, 0, 0x19, 0, 0, 0][..], &[3, 0x1B, 0xFF, 0], &[3, 0x19], &size].concat();
    let (text_at, info_at) = (11, 18 + name.len());
    let sections = [(0, Vec::new()), (1, names.into_bytes()), (text_at, vec![0; 16]), (info_at, info)];
    let flags = if is_new { [4, architecture, 0, 6] } else { [architecture, 5, architecture, 0] };
    let table = 64 + sections.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    let mut image = vec![0; 64];
    image[..9].copy_from_slice(&[0x7F, b'E', b'L', b'F', 2, 1, 1, 0x33, if is_new { 8 } else { 7 }]);
    image[18] = machine;
    image[40..48].copy_from_slice(&table.to_le_bytes());
    image[48..52].copy_from_slice(&flags);
    image[60..64].copy_from_slice(&[4, 0, 1, 0]);
    let mut headers = Vec::new();
    for (name, bytes) in sections {
        let mut header = [0; 64];
        header[..2].copy_from_slice(&u16::try_from(name).unwrap_or(0).to_le_bytes());
        header[4] = 1;
        header[24..32].copy_from_slice(&image.len().to_le_bytes());
        header[32..40].copy_from_slice(&bytes.len().to_le_bytes());
        headers.extend(header);
        image.extend(bytes);
    }
    image.extend(headers);
    image
}

fn load(image: &[u8]) -> (i32, usize) {
    let mut module = 0;
    (cuModuleLoadData(&raw mut module, image.as_ptr().cast()), module)
}

#[test]
fn kernels_of_a_cubin_run_where_it_fits() {
    let _fresh = Fresh::with_context();
    for is_new in [false, true] {
        let (code, module) = load(&cubin(90, is_new, 190));
        ok(code);
        let mut function = 0;
        ok(cuModuleGetFunction(&raw mut function, module, NAME.as_ptr()));
        assert_eq!(cuModuleGetFunction(&mut 0, module, c"kvpool_plan".as_ptr()), NOT_FOUND);
        let out = allocate(8);
        ok(launch(function, 1, 256, &five(out), 0));
        ok(cuStreamSynchronize(0));
        assert_eq!(peek(out), [5, 0, 0, 0, 0, 0, 0, 0]);
    }
}

#[test]
fn cubins_are_for_one_generation() {
    let _fresh = Fresh::with_context();
    let fits = |major, minor, architecture| {
        soft_set_capability(major, minor);
        load(&cubin(architecture, major > 9, 190)).0
    };
    let mut found = 0;
    ok(cuDeviceGetAttribute(&raw mut found, 75, 0));
    assert_eq!(found, 9);
    ok(fits(8, 0, 80));
    ok(fits(8, 9, 80));
    ok(fits(10, 3, 100));
    ok(fits(12, 1, 120));
    for (major, minor, architecture) in [(8, 0, 86), (9, 0, 80), (8, 0, 90), (12, 0, 100)] {
        assert_eq!(fits(major, minor, architecture), NO_BINARY_FOR_GPU, "{major}.{minor} {architecture}");
    }
    ok(cuDeviceGetAttribute(&raw mut found, 75, 0));
    assert_eq!(found, 12);
    assert_eq!(load(&cubin(120, true, 62)).0, INVALID_IMAGE);
}

#[test]
fn text_for_newer_devices_is_refused() {
    let _fresh = Fresh::with_context();
    let load = |text: &CStr| load(text.to_bytes_with_nul()).0;
    let text = c".version 8.0\n.target sm_90\n.address_size 64\n";
    ok(load(text));
    soft_set_capability(8, 9);
    assert_eq!(load(text), INVALID_PTX);
}

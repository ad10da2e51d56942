//! `kvpool._kvpool.BlockHasher`: the hashes of an engine's blocks.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use sha2::{Digest, Sha256};
use twox_hash::XxHash3_128;

use crate::base::Error;
use crate::engines::BlockBytes;

use crate::python::args;
use crate::python::tokens::read_plain;

/// A hash function of vLLM.
#[derive(Clone, Copy)]
enum HashFunction {
    Sha256,
    XxHash3,
}

/// The longest hash.
const LONGEST: usize = 32;

impl HashFunction {
    /// Writes the hash of `bytes` to the front of `hash`, and returns its length.
    fn write(self, bytes: &[u8], hash: &mut [u8; LONGEST]) -> usize {
        match self {
            Self::Sha256 => {
                *hash = Sha256::digest(bytes).into();
                32
            }
            Self::XxHash3 => {
                hash[..16].copy_from_slice(&XxHash3_128::oneshot(bytes).to_be_bytes());
                16
            }
        }
    }
}

/// The hashes of blocks of tokens, each with the hash of the block before it, byte for byte as vLLM computes them for
/// text: of `(parent, tokens, None)`, by one of its `prefix_caching_hash_algo`.
///
/// Args:
///     algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor".
///     block_size: The tokens of a block, at least 1.
///
/// Raises:
///     ConfigError: If the algorithm is another, or `block_size` is below 1.
#[pyclass(frozen, module = "kvpool._kvpool", name = "BlockHasher")]
pub(in crate::python) struct BlockHasher {
    bytes: BlockBytes,
    function: HashFunction,
    block_size: usize,
}

#[pymethods]
impl BlockHasher {
    #[new]
    fn new(algorithm: &str, block_size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (bytes, function) = match algorithm {
            "sha256" => (BlockBytes::Pickle, HashFunction::Sha256),
            "sha256_cbor" => (BlockBytes::Cbor, HashFunction::Sha256),
            "xxhash" => (BlockBytes::Pickle, HashFunction::XxHash3),
            "xxhash_cbor" => (BlockBytes::Cbor, HashFunction::XxHash3),
            _ => {
                let known = "sha256, sha256_cbor, xxhash or xxhash_cbor";
                return Err(Error::config(format!("algorithm is {algorithm:?}; it must be {known}")).into());
            }
        };
        let block_size = args::size("block_size", block_size)?;
        if block_size == 0 {
            return Err(Error::config("block_size is 0; it must be at least 1 token".to_owned()).into());
        }
        Ok(Self { bytes, function, block_size })
    }

    /// Returns the hashes of the full blocks of a prompt from `start` on.
    ///
    /// Args:
    ///     tokens: The tokens of the whole prompt.
    ///     start: The first token of the first block.
    ///     parent: The hash of the block before it.
    ///
    /// Returns:
    ///     A hash for each full block, `None` if what vLLM would compute is not known: if an element is no plain int
    ///     from 0 to 2**31 - 1, the parent has more than 255 bytes, or a pickled block takes 64 KiB.
    fn hashes<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyList>,
        start: usize,
        parent: &Bound<'py, PyBytes>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let count = tokens.len().saturating_sub(start) / self.block_size;
        let (mut block, mut bytes) = (Vec::new(), Vec::new());
        let mut hashes = Vec::with_capacity(count);
        let mut hash = [0; LONGEST];
        let mut parent = parent.as_bytes();
        for at in 0..count {
            let first = start + at * self.block_size;
            block.clear();
            if !read_plain(tokens, first..first + self.block_size, &mut block)
                || !self.bytes.write(parent, &block, &mut bytes)
            {
                return Ok(None);
            }
            let length = self.function.write(&bytes, &mut hash);
            hashes.push(PyBytes::new(py, &hash[..length]));
            parent = &hash[..length];
        }
        PyList::new(py, hashes).map(Some)
    }
}

//! kvpool: the memory core of an LLM serving engine.
//!
//! It decides which request owns each token slot, request row and linear-attention state, keeps the bytes
//! behind them, and describes those bytes to tensor frameworks without copying them.
//!
//! # Layers
//!
//! Folders are layers. Each imports only from those before it:
//!
//! | layer | owns | `unsafe` |
//! |---|---|---|
//! | [`base`] | shared vocabulary: index newtypes, dtype, device, shape, error; locks, blocking sections, the gate for forks | in `prefetch.rs` |
//! | [`layout`] | what a model keeps, and where its bytes lie: planes, groups, slabs; every address is computed here | no |
//! | [`index`] | ownership of integers: bitmaps, free lists, slots, rows, owners, requests, reference counts, buckets, address spaces, move plans | no |
//! | [`cache`] | which prefixes are cached: a tree over tokens, holds on it, policies of eviction | no |
//! | [`memory`] | sources of bytes: backends, regions; devices, streams, events | yes |
//! | [`kernels`] | operations on rows and on the request table: on the CPU, and as CUDA kernels with their launches | yes |
//! | [`tensor`] | descriptions of bytes for other libraries: views, DLPack | in `dlpack.rs` |
//! | [`transfer`] | bytes between memory and other places: copies beside a stream, threads for them, the files of a store | no |
//! | [`pool`] | one file per class: indices and caches joined to bytes by executors, views and transfers | no |
//! | [`engines`] | bookkeeping by the rules of one engine: its tree, its blocks, what it offloads | no |
//! | `python` | the extension module: convert, delegate, map errors | where tensors cross |
//!
//! A program uses [`pool`], with [`base`], [`memory`], [`tensor`] and [`kernels::Indices`] for arguments and
//! results: these follow semantic versioning. The other layers are public for tools and tests that look into
//! a pool, and may change in any version.
//!
//! # Invariants
//!
//! - **All or nothing.** A call validates all of its input, then acts. A failed call leaves no trace.
//! - **Full is an answer** (`Option`), **misuse is an error** ([`base::Error`]), in release builds too.
//! - **No integer has two owners.** Every index is free, released, fenced or live, and in one state only.
//! - **The padding index has no owner.** Index 0 of every index space is never handed out.
//! - **A view owns its memory.** An address is reachable only through an `Arc` of its [`memory::Region`].
//!
//! # Devices
//!
//! A pool is made on a [`memory::Backend`] and stays on its device. On a GPU every call names the
//! [`memory::Stream`] on which its work is enqueued. Memory handed out is valid in the order of that stream;
//! another stream needs an event. Ownership lives on the host, which never asks the device for it. After
//! construction no call waits for the device or allocates device memory, unless its documentation says so.
//!
//! # Features
//!
//! | feature | brings | needs |
//! |---|---|---|
//! | (none) | the whole core on CPU | `half`, `libc` |
//! | `cuda` | NVIDIA devices, found at run time | `cudarc` |
//! | `python` | the extension module | `pyo3`, `numpy`, `blake3` |

// There this is the only error: nothing else is compiled.
#[cfg(windows)]
compile_error!("kvpool does not run on Windows: it needs mmap, which Linux has; use it in WSL 2");

#[cfg(not(windows))]
pub mod base;
#[cfg(not(windows))]
pub mod cache;
#[cfg(not(windows))]
pub mod engines;
#[cfg(not(windows))]
pub mod index;
#[cfg(not(windows))]
pub mod kernels;
#[cfg(not(windows))]
pub mod layout;
#[cfg(not(windows))]
pub mod memory;
#[cfg(not(windows))]
pub mod pool;
#[cfg(all(feature = "python", not(windows)))]
mod python;
#[cfg(not(windows))]
pub mod tensor;
#[cfg(not(windows))]
pub mod transfer;

/// The examples of the guide, which run as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/rust.md")]
struct Guide;

//! Which rows a call copies where.

use crate::base::{Error, Result};
use crate::index::{Move, plan_moves};
use crate::kernels::{Copies, Indices, Numbers};

/// The plan for indices of the host: row `src[i]` to row `dst[i]`, as if all were read before any is written.
pub(super) fn host_copies(
    dst: &Indices<'_>,
    src: &Indices<'_>,
    noun: &str,
    rows: usize,
) -> Result<Vec<Move>> {
    same_length(dst, src)?;
    Ok(plan_moves(&dst.on_host()?.rows(noun, rows)?, &src.on_host()?.rows(noun, rows)?))
}

/// Does `work` with the plan for a GPU: as [`host_copies`] where the host knows both, else as they come.
pub(super) fn with_copies(
    dst: &Indices<'_>,
    src: &Indices<'_>,
    noun: &str,
    rows: usize,
    work: impl FnOnce(Copies<'_>) -> Result<()>,
) -> Result<()> {
    same_length(dst, src)?;
    if let (Indices::Host(_), Indices::Host(_)) = (dst, src) {
        return work(Copies::Planned(&host_copies(dst, src, noun, rows)?));
    }
    let (targets, sources) = (dst.list(noun, rows)?, src.list(noun, rows)?);
    let (target, source): (Numbers<'_>, Numbers<'_>) = (dst.numbers(&targets), src.numbers(&sources));
    work(Copies::Unplanned { target, source, count: dst.len() })
}

fn same_length(dst: &Indices<'_>, src: &Indices<'_>) -> Result<()> {
    if dst.len() == src.len() {
        return Ok(());
    }
    Err(Error::config(format!("{} destinations and {} sources; there must be as many", dst.len(), src.len())))
}

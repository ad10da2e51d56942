//! Linear-attention states: copies as if all sources were read first, resets, and ownership of track slots.

use std::collections::VecDeque;

use kvpool::base::{DType, ErrorKind, Id, widen};
use kvpool::kernels::Indices;
use kvpool::pool::{GdnConfig, GdnPool};
use kvpool::tensor::TensorView;

use super::{Refusal, STREAM, Source, agree, bytes_of, contents, ensure, host, int, places, refused};

struct Model {
    /// The bytes by state, layer and slot.
    states: [Vec<Vec<Vec<u8>>>; 2],
    free: VecDeque<usize>,
    dropped: usize,
    marks: u8,
}

pub(super) fn run(source: &mut Source<'_>) {
    let config = GdnConfig {
        max_reqs: 1 + source.below(6),
        num_gdn_layers: 1 + source.below(2),
        num_v_heads: 1,
        head_k_dim: 1 + source.below(3),
        head_v_dim: 2,
        conv_dim: 3,
        conv_kernel_size: 1 + source.below(3),
        dtype: DType::BF16,
        max_track_slots: source.below(4),
        strict: source.rarely(3),
    };
    let pool = GdnPool::new(&config, &host()).expect("memory");
    let first = config.max_reqs + 1;
    let mut model = Model {
        states: views(&pool).map(|view| split(&view, config.num_gdn_layers, pool.pool_size())),
        free: (first..first + config.max_track_slots).collect(),
        dropped: 0,
        marks: 0,
    };
    while source.next_step() {
        step(source, &pool, &mut model);
        check(&pool, &model);
    }
}

fn views(pool: &GdnPool) -> [TensorView; 2] {
    [pool.recurrent_state().clone(), pool.conv_state().clone()]
}

/// The bytes of a state by layer and slot.
fn split(view: &TensorView, layers: usize, slots: usize) -> Vec<Vec<Vec<u8>>> {
    let bytes = bytes_of(view);
    let row = bytes.len() / (layers * slots);
    let slot = |layer: usize, slot: usize| bytes[(layer * slots + slot) * row..][..row].to_vec();
    (0..layers).map(|layer| (0..slots).map(|at| slot(layer, at)).collect()).collect()
}

fn step(source: &mut Source<'_>, pool: &GdnPool, model: &mut Model) {
    let slots = pool.pool_size();
    match source.below(10) {
        0..=3 => {
            let src = source.indices(8, slots);
            let dst: Vec<i64> = if source.rarely(8) {
                source.indices(8, slots)
            } else {
                src.iter().map(|_| source.index(slots)).collect()
            };
            let [from, to] = [&src, &dst].map(|given| Indices::Host(source.index_vec(given)));
            let known = ensure(src.len() == dst.len(), ErrorKind::Argument)
                .and_then(|()| Ok((places(&dst, slots)?, places(&src, slots)?)));
            agree(pool.copy_states(&from, &to, STREAM), &known);
            let Ok((dst, src)) = known else { return };
            for layer in model.states.iter_mut().flatten() {
                let before = layer.clone();
                for (&dst, &src) in dst.iter().zip(&src) {
                    layer[dst].clone_from(&before[src]);
                }
            }
        }
        4 => {
            let given = source.indices(3, slots);
            let known = places(&given, slots);
            agree(pool.reset_states(&Indices::Host(source.index_vec(&given)), STREAM), &known);
            for slot in known.into_iter().flatten() {
                model.states.iter_mut().flatten().for_each(|layer| layer[slot].fill(0));
            }
        }
        5..=7 => write(source, pool, model),
        8 => {
            let taken = pool.alloc_track_slot();
            assert_eq!(taken.map(|slot| int(widen(slot.number()))), model.free.pop_front().map(int));
        }
        _ => {
            let (first, slot) = (pool.config().max_reqs + 1, source.index(slots + 2));
            let live = usize::try_from(slot).ok();
            let live = live.filter(|slot| (first..slots).contains(slot) && !model.free.contains(slot));
            let is_right = live.is_some() || !pool.strict();
            let expected = ensure(is_right, Refusal::at(ErrorKind::IndexOwnership, slot));
            let Some(bad) = agree(pool.free_track_slot(slot), &expected) else { return };
            assert_eq!(bad.dropped(), usize::from(live.is_none()));
            model.dropped += bad.dropped();
            model.free.extend(live);
        }
    }
}

/// Writes to the states of a slot, as a kernel would.
fn write(source: &mut Source<'_>, pool: &GdnPool, model: &mut Model) {
    let (slots, layers) = (pool.pool_size(), pool.config().num_gdn_layers);
    let (slot, layer, which) = (source.below(slots), source.below(layers), source.below(2));
    model.marks = model.marks.wrapping_add(1);
    let row = &mut model.states[which][layer][slot];
    row.fill(model.marks);
    let view = &views(pool)[which];
    let offset = view.offset() + (layer * slots + slot) * row.len();
    contents::fill(view.region(), offset, row.len(), model.marks);
}

fn check(pool: &GdnPool, model: &Model) {
    let layers = pool.config().num_gdn_layers;
    for (view, state) in views(pool).iter().zip(&model.states) {
        assert_eq!(bytes_of(view), state.concat().concat());
    }
    for layer in 0..layers {
        let parts = pool.layer_state(layer).expect("a layer");
        for (part, state) in parts.iter().zip(&model.states) {
            assert_eq!(bytes_of(part), state[layer].concat());
        }
    }
    refused(pool.layer_state(layers), ErrorKind::Index);
    pool.with_tracks(|tracks| {
        assert_eq!((tracks.rows().broken_invariant(), tracks.dropped_frees()), (None, model.dropped));
        assert_eq!(tracks.rows().available(), model.free.len());
    });
}

//! Every pass of every kernel, one thread.

use burn_spatial_benches::cases::CASES;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

#[global_allocator]
static BUFFERS: burn_spatial::buffers::Buffers = burn_spatial::buffers::Buffers;

fn kernels(criterion: &mut Criterion) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    for case in CASES {
        let ready = case.ready();
        let mut group = criterion.benchmark_group(case.name.replace(' ', "_"));
        // A unit of throughput is a thousand operations, so that "elements" a second read as kFLOP/s.
        group.sample_size(10).throughput(Throughput::Elements((case.gflop() * 1e6) as u64));
        for pass in case.passes() {
            let run = ready.pass(*pass);
            group.bench_function(pass.name(), |bencher| bencher.iter(|| pool.install(&run)));
        }
        group.finish();
    }
}

criterion_group!(benches, kernels);
criterion_main!(benches);

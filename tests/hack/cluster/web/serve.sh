# answers with its version and pod name; on SIGTERM says so, finishes in a second and leaves with 0
busybox mkdir -p /tmp/www
echo "v$VERSION $HOSTNAME" > /tmp/www/index.html
busybox httpd -f -p 8080 -h /tmp/www & server=$!
trap 'echo draining; busybox sleep 1; kill $server; echo bye; exit 0' TERM
echo "serving v$VERSION"
wait $server
